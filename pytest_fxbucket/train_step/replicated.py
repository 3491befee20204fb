"""Models under DDP, captured as they are; and gradients averaged as DDP does of what nothing else reduces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import reached
from pytest_fxbucket.capture.model import forward_instead
from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.compat.dtensors import local_of
from pytest_fxbucket.compat.fake_tensors import unwatched
from pytest_fxbucket.compat.fsdp import Ranks
from pytest_fxbucket.compat.modules import tensors_within
from pytest_fxbucket.errors import CaptureError


def refuse_settings(name: str, module: nn.parallel.DistributedDataParallel) -> None:
    """Raise :class:`CaptureError` for what DDP does by settings that a captured step does not do."""
    where = f"module {name}" if name else "the model"
    if module.broadcast_buffers and list(module.buffers()):
        raise CaptureError(
            f"{where} is under DDP, which sends the buffers of rank 0 to all before each forward, and a captured step does "
            "not; make it with broadcast_buffers=False"
        )
    settings = {
        "a comm hook": module._comm_hooks,
        "mixed precision": module.mixed_precision is not None,
        "delay_all_reduce_named_params": module._delay_all_reduce_params,
    }
    if what := next((what for what, is_set in settings.items() if is_set), ""):
        raise CaptureError(f"{where} is under DDP with {what}, which a captured step does not take over; leave it out")


def under_ddp(model: nn.Module, module: nn.Module, twins: Mapping[str, torch.Tensor], inside: ExitStack) -> None:
    """Until the end of ``inside`` have ``module``, part of ``model``, call the module that it wraps.

    Gradients of ``twins``, fake tensors by FQN, are averaged then, unless it is called in ``no_sync()``.
    """
    # By their first names, since another module may have them, too.
    replica: Any = module
    first = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    own = replica.module.named_parameters()
    fqns = [first[id(parameter)] for inner, parameter in own if inner not in replica.parameters_to_ignore]
    # As in DDP, a forward with gradients decides whether the backward after it reduces: once, and all it has been given.
    # With ``find_unused_parameters`` that is also what earlier backwards gave to parameters which the forward left out.
    synced, reduced, given, left_out = [False], set[str](), set[str](), list[str]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = replica.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if replica.require_backward_grad_sync:
                synced[0] = True
                reduced.clear()
                used = {id(one) for one in reached(tensors_within(out), {})[1]} if replica.find_unused_parameters else set()
                left_out[:] = [fqn for fqn in fqns if used and fqn in given and id(twins[fqn]) not in used]
            elif reduced:
                synced[0] = False
        return out

    def reduces(fqn: str) -> list[str]:
        given.add(fqn)
        if not synced[0] or fqn in reduced:
            return []
        found = [*left_out, fqn]
        left_out.clear()
        given.difference_update(found)
        reduced.update(found)
        return found

    inside.enter_context(forward_instead(module, forward))
    averaged(fqns, Ranks(replica.process_group.group_name, replica.process_group.size()), reduces, twins, inside)


def averaged(
    fqns: Sequence[str], over: Ranks, reduces: Callable[[str], list[str]], twins: Mapping[str, torch.Tensor], inside: ExitStack
) -> None:
    """Until the end of ``inside`` have gradients averaged as DDP does: divided by the number of ranks, then summed.

    ``reduces`` says of which parameters, by FQN, once the gradient of the one that it is given is accumulated.
    """

    # Unwatched below, since the read of .grad in here is none of the step's.
    def average(accumulated: str, _: torch.Tensor) -> None:
        for fqn in reduces(accumulated) if over.size > 1 else ():
            if (own := twins[fqn].grad) is not None:
                gradient = local_of(own)
                with torch.no_grad():
                    gradient.copy_(collective("all_reduce", gradient / over.size, "sum", over.name))

    for fqn in fqns:
        if twins[fqn].requires_grad:
            handle = twins[fqn].register_post_accumulate_grad_hook(unwatched(partial(average, fqn)))
            inside.callback(handle.remove)
