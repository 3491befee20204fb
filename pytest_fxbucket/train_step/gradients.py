"""Follows ``.grad`` of parameters through one step: whether what was there before counts, and what is there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Gradients:
    """Gradients of the parameters' stand-ins.

    A step that begins with ``zero_grad()`` does not care whether there were gradients, so that one graph does for its first
    call and for all later ones. Who reads, accumulates into or keeps a gradient of before does care.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], on_read: Callable[[str, torch.Tensor], None]) -> None:
        self._parameters, self._on_read = parameters, on_read
        self._fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        self._before = {fqn: parameter.grad for fqn, parameter in parameters.items()}
        self._counts: dict[str, bool] = {}

    def set(self, parameter: torch.Tensor, value: Any) -> None:
        """``parameter.grad`` is about to become ``value``."""
        fqn = self._fqns.get(id(parameter))
        if fqn is not None and value is None:
            self._counts.setdefault(fqn, parameter.grad is not self._before[fqn])
        elif fqn is not None:
            self._counts.setdefault(fqn, True)

    def read(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Somebody looked at ``parameter.grad`` and found ``gradient``."""
        fqn = self._fqns.get(id(parameter))
        if fqn is None:
            return
        self._counts.setdefault(fqn, True)
        if gradient is not None:
            self._on_read(fqn, gradient)

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """What ``zero_grad()`` does, seen before it looks whether there is any."""
        for parameter in parameters:
            self.set(parameter, None)

    def counting(self) -> dict[str, bool]:
        """By parameter whether it had a gradient before the step, where that makes a difference."""
        found = self._parameters.items()
        counts = {fqn for fqn, p in found if self._counts.get(fqn, p.grad is not self._before[fqn])}
        return {fqn: self._before[fqn] is not None for fqn in self._parameters if fqn in counts}

    def left(self) -> dict[str, torch.Tensor | None]:
        """Gradients that the step leaves behind, None where it leaves none; without those that it did not replace."""
        cleared = {fqn for fqn, p in self._parameters.items() if p.grad is None and fqn in self._counts}
        changed = {fqn: p.grad for fqn, p in self._parameters.items() if p.grad is not self._before[fqn]}
        return changed | dict.fromkeys(cleared)


@contextmanager
def watching_zero_grad(
    model: nn.Module, optimizers: Iterable[Optimizer], drop: Callable[[Iterable[torch.Tensor]], None]
) -> Iterator[None]:
    """While inside, ``zero_grad()`` of modules and optimizers tells what it drops."""
    owners: list[Any] = [*model.modules(), *optimizers]
    before = [vars(owner).get("zero_grad") for owner in owners]
    for owner in owners:
        owner.zero_grad = _telling(owner, owner.zero_grad, drop)
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            if own is None:
                del owner.zero_grad
            else:
                owner.zero_grad = own


def _telling(owner: Any, zero_grad: Callable[..., None], drop: Callable[[Iterable[torch.Tensor]], None]) -> Callable[..., None]:
    def telling(set_to_none: bool = True) -> None:
        if set_to_none:
            drop(_parameters(owner))
        zero_grad(set_to_none)

    return telling


def _parameters(owner: Any) -> Iterable[torch.Tensor]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return (parameter for group in owner.param_groups for parameter in group["params"])
