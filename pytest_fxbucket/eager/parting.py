"""Where an eager step parts from a graph: the first operator of a module whose bits are nowhere in the graph.

Operators are seen as they are called, each with the module whose forward runs; in backward that is the module of the autograd
node at work. What wraps the model (gathers, reductions, copies into buckets) is left out: a graph has other buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_fxbucket.checks.bits import bits_digest
from pytest_fxbucket.compat import autograd_order, pytree
from pytest_fxbucket.compat.dispatch import TorchDispatchMode
from pytest_fxbucket.eager.step import local, plain

if TYPE_CHECKING:
    from types import FrameType

    from pytest_fxbucket.capture.roles import Direction

_LOSS = "the loss"
_UNDEFINED = ("aten::empty", "aten::new_empty")
"""Operators whose values mean nothing until they are written."""
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "pytest_fxbucket.ranks.")
"""Modules whose operators are no part of a model: the last sums in rank order."""


@dataclass(frozen=True, slots=True)
class Parting:
    """What was called first that the graph has not computed; all empty if there is nothing."""

    module: str = ""
    """FQN, or "the loss"."""
    operator: str = ""
    direction: Direction = "forward"


def first_parting(model: nn.Module, known: Collection[str], take: Callable[[], object]) -> Parting:
    """Follow ``take()``, a step of ``model``; ``known`` are digests of all that the graph computed."""
    follower = _Follower(known)
    with _bodies(model, follower), follower:
        take()
    return follower.first or Parting()


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]  # __init_subclass__
    """Sees operators; ``inside`` are the modules whose forward runs."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.inside: list[str] = []
        self.first: Parting | None = None
        self._known = known
        self._module_of: dict[int, str] = {}
        self._is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        node = autograd_order.node_at_work()
        if func._schema.name.startswith(_UNDEFINED) or _is_wrappers(in_backward=node is not None):
            return made
        self._is_backward = self._is_backward or node is not None
        module = self._module(node)
        if module is not None and self.first is None and not self._has(made):
            self.first = Parting(module, str(func), "backward" if node is not None else "forward")
        return made

    def _module(self, node: int | None) -> str | None:
        """The module that what is called belongs to; None for what belongs to none."""
        if not self.inside and node is not None:
            return self._module_of.get(node)
        if not self.inside and (self._is_backward or not self._module_of):
            return None
        module = self.inside[-1] if self.inside else _LOSS
        self._module_of[autograd_order.last_node()] = module
        return module

    def _has(self, made: Any) -> bool:
        tensors = [local(one) for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]
        return all(bits_digest([one]) in self._known for one in tensors if one.numel())


def _is_wrappers(*, in_backward: bool) -> bool:
    """Whether what wraps the model called an operator, and not the model's own code or its backward.

    Forward runs below this module; process groups call some operators in threads of their own.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) != __name__:
        if name.startswith(_WRAPPERS):
            return True
        frame = frame.f_back
    return frame is None and not in_backward


@contextmanager
def _bodies(model: nn.Module, follower: _Follower) -> Iterator[None]:
    """While inside, ``follower`` knows which module's forward runs."""
    before = [(module, module.__dict__.get("forward")) for module in model.modules()]
    for fqn, module in model.named_modules():
        module.forward = partial(_body, follower, plain(fqn), module.forward)
    try:
        yield
    finally:
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def _body(follower: _Follower, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    follower.inside.append(fqn)
    try:
        return forward(*args, **kwargs)
    finally:
        follower.inside.pop()
