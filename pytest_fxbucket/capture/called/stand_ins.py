"""Fake tensors in the places of real ones, in a model and its optimizers, for as long as a step is traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.called.signature import PLAIN, plain_values
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.called.live import Live
    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


def fake_twin(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """A tensor without data like ``real``: a parameter for a parameter, with its attributes and hooks."""
    with mode, torch.no_grad():
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)
    if not isinstance(real, torch.nn.Parameter):
        return fake.requires_grad_(real.requires_grad)
    twin = torch.nn.Parameter(fake, requires_grad=real.requires_grad)
    for name, value in vars(real).items():
        if not hasattr(twin, name):
            setattr(twin, name, value)
    for hook in (real._backward_hooks or {}).values():
        twin.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return twin


def refuse_other_kinds(live: Live) -> None:
    """Only plain tensors have fake twins."""
    for fqn, tensor in (live.params | live.buffers).items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CaptureError(
                f"{fqn} is a tensor of type {type(tensor).__name__}; a captured step takes plain tensors, so keep the local "
                "part as parameter and let forward make the rest of it"
            )


@contextmanager
def in_modules(model: nn.Module, twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While inside, modules have the ``twins`` (by identity of the real tensor) in their places; then all is as before.

    Raises :class:`CaptureError` on leaving if a module replaced a buffer or sets an attribute: a graph would not do it again.
    """
    before = [(fqn, module, dict(vars(module))) for fqn, module in model.named_modules()]
    places = [held for _, module, _ in before for held in (module._parameters, module._buffers)]
    reals = [dict(held) for held in places]
    try:
        for held in places:
            held.update({name: twins[id(tensor)] for name, tensor in held.items() if tensor is not None})
        given = [dict(held) for held in places]
        yield
        for fqn, module, attributes in before:
            _refuse_new_attributes(fqn, module, attributes)
        for (fqn, _, _), now, then in zip(before, places[1::2], given[1::2], strict=True):
            _refuse_new_buffers(fqn, now, then)
    finally:
        for _, module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for held, real in zip(places, reals, strict=True):
            held.clear()
            held.update(real)


def _refuse_new_attributes(fqn: str, module: nn.Module, before: Mapping[str, Any]) -> None:
    for name, value in vars(module).items():
        if name not in before or (before[name] is not value and not _same(before[name], value)):
            raise CaptureError(
                f"module {fqn or 'at the root'} sets its attribute {name} in forward, which a graph does not do again; "
                "give it back from forward, or keep it in a buffer"
            )


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, PLAIN) and isinstance(other, PLAIN) and repr(one) == repr(other)


def _refuse_new_buffers(fqn: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if value is not before.get(name):
            raise CaptureError(f"buffer {f'{fqn}.{name}'.lstrip('.')} is replaced in forward; write it in place, as with copy_")


@contextmanager
def in_optimizers(live: Live, twins: Mapping[int, torch.Tensor], rates: Mapping[str, Any]) -> Iterator[None]:
    """While inside, optimizers step the ``twins`` with learning rates ``rates``, by name; their state has twins as well.

    Raises :class:`CaptureError` on leaving if a group, or what of the state is no tensor, was changed.
    """
    before = [(optimizer, optimizer.state, list(optimizer.param_groups)) for optimizer in live.optimizers]
    groups = [(name, group, dict(group)) for name, group in live.groups()]
    try:
        for optimizer, state, _ in before:
            optimizer.state = defaultdict(dict, _twin_state(state, twins))
        plain = [_plain_state(optimizer) for optimizer in live.optimizers]
        for name, group, _ in groups:
            group["params"] = [twins[id(parameter)] for parameter in group["params"]]
            if f"{name}.lr" in rates:
                group["lr"] = rates[f"{name}.lr"]
        yield
        for (optimizer, _, held), then in zip(before, plain, strict=True):
            _refuse_new_state(optimizer, held, then)
        for name, group, was in groups:
            _refuse_other_group(name, group, was, rates.get(f"{name}.lr", was.get("lr")))
    finally:
        for optimizer, state, held in before:
            optimizer.state = state
            optimizer.param_groups[:] = held
        for _, group, was in groups:
            group.clear()
            group.update(was)


def _twin_state(state: Mapping[Any, Any], twins: Mapping[int, torch.Tensor]) -> dict[Any, Any]:
    return {
        twins[id(parameter)]: {
            key: twins[id(value)] if isinstance(value, torch.Tensor) else value for key, value in held.items()
        }
        for parameter, held in state.items()
        if id(parameter) in twins
    }


def _plain_state(optimizer: Optimizer) -> dict[tuple[int, str], str]:
    return {
        (id(parameter), key): repr(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


def _refuse_new_state(optimizer: Optimizer, groups: list[Any], before: Mapping[tuple[int, str], str]) -> None:
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != len(groups):
        raise CaptureError(f"the step adds a parameter group to the optimizer {name}; add it before the step is called")
    for (parameter, key), value in _plain_state(optimizer).items():
        if before.get((parameter, key), value) != value:
            raise CaptureError(f"the optimizer {name} keeps {key} outside of tensors, and changes it; keep it in a tensor")


def _refuse_other_group(name: str, group: dict[str, Any], before: dict[str, Any], rate: Any) -> None:
    if group.get("lr") is not rate:
        raise CaptureError(f"the step sets the learning rate of {name}; call the scheduler after the step, not in it")
    changed = [key for key, value in plain_values(group).items() if plain_values(before).get(key) != value]
    if changed:
        raise CaptureError(f"the step sets {changed[0]} of {name}; set it between steps, not in one")
