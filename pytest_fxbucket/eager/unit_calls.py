"""How one forward calls the modules of a plan's entries: more than once, or with values that others read, too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_fxbucket.capture.names import units_of
from pytest_fxbucket.compat import pytree, tracing

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan

_Value = tuple[int, int]
"""Number of the autograd node that made a tensor, and the place among its outputs."""


@dataclass(frozen=True, slots=True)
class UnitCalls:
    """What is to be known of them; nothing, where nobody asked."""

    reused: frozenset[str] = frozenset()
    """Modules that are called more than once."""
    share_inputs: bool = False
    """Whether a module reads a value more than once that is read behind it, too: three gradients, that two orders add."""


@dataclass(slots=True)
class _Call:
    """From the autograd node ``begin`` to that before ``end``."""

    given: list[_Value]
    begin: int
    end: int = 0


def unit_calls(model: nn.Module, plan: Plan, call: Callable[[nn.Module], object]) -> UnitCalls:
    """What ``call(model)``, one forward, does; hooks are left on ``model``."""
    counts: Counter[str] = Counter()
    calls: dict[str, _Call] = {}
    found: list[_Call] = []

    def begin(fqn: str, _: nn.Module, args: object, kwargs: object) -> None:
        counts[fqn] += 1
        given = [(tracing.autograd_number(one.grad_fn), one.output_nr) for one in _with_gradient((args, kwargs))]
        calls[fqn] = _Call(given, tracing.next_autograd_number())
        found.append(calls[fqn])

    def end(fqn: str, *_: object) -> None:
        calls[fqn].end = tracing.next_autograd_number()

    for fqn in units_of(model, plan.bucket.plan):
        model.get_submodule(fqn).register_forward_pre_hook(partial(begin, fqn), with_kwargs=True)
        model.get_submodule(fqn).register_forward_hook(partial(end, fqn))
    with torch.enable_grad():  # a loss may go backward within forward
        made = call(model)
    readers = _readers(made)
    shares = any(_is_shared(one, readers[value]) for one in found for value in one.given)
    return UnitCalls(frozenset(fqn for fqn, times in counts.items() if times > 1), shares)


def _is_shared(call: _Call, readers: list[int]) -> bool:
    within = sum(call.begin <= one < call.end for one in readers)
    return within > 1 and any(one >= call.end for one in readers)


def _readers(made: object) -> defaultdict[_Value, list[int]]:
    """Numbers of the autograd nodes that read a value, each as often as it does, for all values behind ``made``."""
    found: defaultdict[_Value, list[int]] = defaultdict(list)
    known: set[int] = set()
    for one in _with_gradient(made):
        for node in tracing.nodes_behind(one.grad_fn, known):
            known.add(tracing.autograd_number(node))
            for read, place in node.next_functions:
                if read is not None:
                    found[tracing.autograd_number(read), place].append(tracing.autograd_number(node))
    return found


def _with_gradient(values: object) -> Iterator[Any]:
    for one in pytree.tree_leaves(values):
        if isinstance(one, torch.Tensor) and one.grad_fn is not None:
            yield one
