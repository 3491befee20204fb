"""Makes an optimizer's state before its first step: a step that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.dispatch import TorchDispatchMode
from pytest_fxbucket.compat.storage import storage_key

if TYPE_CHECKING:
    from torch.optim import Optimizer

_STILL = {"weight_decay": 0.0, "maximize": False}
"""What would let a parameter or a sign into state that begins as a copy of the gradient."""


def make_state(optimizers: Sequence[Optimizer], with_gradient: Collection[torch.Tensor]) -> None:
    """Let ``optimizers`` make the state of the parameters ``with_gradient``, real or fake; nothing else changes.

    Each takes one step with gradients of negative zero, after which everything that was written gets its value from before the
    first write. Negative zero added to any number is that number, so momentum, which begins as a copy of the first gradient,
    gives the same bits from this state as from none (with dampening it does not: the first gradient counts whole in eager).
    """
    wanted = {id(tensor) for tensor in with_gradient}
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, -0.0) if id(parameter) in wanted else None
        with _still(optimizer), torch.no_grad(), _PutBack():
            optimizer.step()
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


@contextmanager
def _still(optimizer: Optimizer) -> Iterator[None]:
    before = [{key: group[key] for key in _STILL if key in group} for group in optimizer.param_groups]
    for group, known in zip(optimizer.param_groups, before, strict=True):
        group.update({key: _STILL[key] for key in known})
    try:
        yield
    finally:
        for group, known in zip(optimizer.param_groups, before, strict=True):
            group.update(known)


class _PutBack(TorchDispatchMode):
    """On leaving, gives every tensor that was written its value from before, but those that had none: ``empty``."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(args[place] if place < len(args) else kwargs.get(argument.name))
        result = func(*args, **kwargs)
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self._saved[storage_key(result)] = (result, None)
        return result

    def _save(self, written: Any) -> None:
        if isinstance(written, (list, tuple)):
            for tensor in written:
                self._save(tensor)
        elif isinstance(written, torch.Tensor) and storage_key(written) not in self._saved:
            self._saved[storage_key(written)] = (written, written.clone())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, before in self._saved.values():
            if before is not None:
                tensor.copy_(before)
