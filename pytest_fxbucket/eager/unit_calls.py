"""How one forward calls the modules of a plan's entries: more than once, or with values that others read, too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from pytest_fxbucket.capture.names import units_of
from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.modules import each_tensor

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan


_Value = tuple[Node, int]
"""The autograd node that a tensor's gradient goes to, and the place among its inputs."""


@dataclass(frozen=True, slots=True)
class UnitCalls:
    """What is to be known of them; nothing, where nobody asked."""

    reused: frozenset[str] = frozenset()
    """Modules that are called more than once."""
    share_inputs: bool = False
    """Whether a module's reads of a value may be added in another order than one after the other.

    It reads the value more than once, and others do behind it: three gradients. Or it is given the value more than once.
    """


@dataclass(slots=True)
class _Call:
    """From the autograd node ``begin`` to that before ``end``."""

    given: list[_Value]
    begin: int
    end: int = 0


def unit_calls(model: nn.Module, plan: Plan, call: Callable[[nn.Module], object]) -> UnitCalls:
    """What ``call(model)``, which gives the loss, does; hooks are left on ``model``."""
    counts: Counter[str] = Counter()
    calls: dict[str, _Call] = {}
    found: list[_Call] = []

    def begin(fqn: str, _: nn.Module, args: object, kwargs: object) -> None:
        counts[fqn] += 1
        calls[fqn] = _Call(_values_in((args, kwargs)), tracing.next_autograd_number())
        found.append(calls[fqn])

    def end(fqn: str, *_: object) -> None:
        calls[fqn].end = tracing.next_autograd_number()

    # FSDP2 makes a unit of each module of experts, too.
    for fqn in dict.fromkeys((*units_of(model, plan.bucket.plan), *forwards_of(model, plan).experts)):
        model.get_submodule(fqn).register_forward_pre_hook(partial(begin, fqn), with_kwargs=True)
        model.get_submodule(fqn).register_forward_hook(partial(end, fqn))
    with torch.enable_grad():  # a loss may go backward within forward
        loss = call(model)
    readers = _readers(_values_in(loss))
    shares = any(one.given.count(value) > 1 or _is_shared(one, readers[value]) for one in found for value in one.given)
    return UnitCalls(frozenset(fqn for fqn, times in counts.items() if times > 1), shares)


def _is_shared(call: _Call, readers: list[int]) -> bool:
    within = sum(call.begin <= one < call.end for one in readers)
    return within > 1 and any(one >= call.end for one in readers)


def _readers(made: list[_Value]) -> defaultdict[_Value, list[int]]:
    """Numbers of the autograd nodes that read a value, each as often as it does, for all values behind ``made``."""
    found: defaultdict[_Value, list[int]] = defaultdict(list)
    known: set[int] = set()
    for last, _ in made:
        for node in tracing.nodes_behind(last, known):
            known.add(tracing.autograd_number(node))
            for read, place in node.next_functions:
                if read is not None:
                    found[read, place].append(tracing.autograd_number(node))
    return found


def _values_in(given: object) -> list[_Value]:
    """Those of the tensors with gradients in ``given``, parameters too."""
    found: list[_Value] = []

    def note(tensor: Any) -> Any:
        if tensor.requires_grad:
            found.append((get_gradient_edge(tensor).node, tensor.output_nr))
        return tensor

    each_tensor(note, given)
    return found
