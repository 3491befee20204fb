"""Where an eager step parts from a graph: the first operator of a module whose bits are nowhere in the graph.

Operators are seen as they are called, each with the module whose forward runs; in backward that is the module of the autograd
node at work. What hooks do (gathers, reductions, copies into buckets) is left out: a graph has other buckets.
"""

from __future__ import annotations

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
from pytest_fxbucket.eager.step import local

if TYPE_CHECKING:
    from pytest_fxbucket.graph.reading import Direction

_LOSS = "the loss"


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
    """Sees operators; ``inside`` are the modules that run, and whether their own forward does, or a hook."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[tuple[str, bool]] = []
        self.first: Parting | None = None
        self._known = known
        self._module_of: dict[int, str] = {}
        self._is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        node = autograd_order.node_at_work()
        self._is_backward = self._is_backward or node is not None
        module = self._module(node)
        if module is not None and self.first is None and not self._has(made):
            self.first = Parting(module, str(func), "backward" if node is not None else "forward")
        return made

    def _module(self, node: int | None) -> str | None:
        """The module that what is called belongs to; None for what belongs to none."""
        if self.inside:
            module, is_body = self.inside[-1]
            if not is_body:
                return None
            self._module_of[autograd_order.last_node()] = module
            return module
        if node is not None:
            return self._module_of.get(node)
        if self._is_backward or not self._module_of:
            return None
        self._module_of[autograd_order.last_node()] = _LOSS
        return _LOSS

    def _has(self, made: Any) -> bool:
        tensors = [local(one) for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]
        return all(bits_digest([one]) in self._known for one in tensors if one.numel())


@contextmanager
def _bodies(model: nn.Module, follower: _Follower) -> Iterator[None]:
    """While inside, ``follower`` knows which module's forward runs."""
    handles, before = [], []
    for fqn, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(_entered, follower, fqn), prepend=True))
        handles.append(module.register_forward_hook(partial(_left, follower)))
        before.append((module, module.__dict__.get("forward")))
        module.forward = partial(_body, follower, fqn, module.forward)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, forward in before:
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def _entered(follower: _Follower, fqn: str, module: nn.Module, given: Any) -> None:
    follower.inside.append((fqn, False))


def _left(follower: _Follower, module: nn.Module, given: Any, made: Any) -> None:
    follower.inside.pop()


def _body(follower: _Follower, fqn: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not follower.inside:  # called past its hooks
        follower.inside.append((fqn, True))
        try:
            return forward(*args, **kwargs)
        finally:
            follower.inside.pop()
    follower.inside[-1] = (fqn, True)
    try:
        return forward(*args, **kwargs)
    finally:
        follower.inside[-1] = (fqn, False)
