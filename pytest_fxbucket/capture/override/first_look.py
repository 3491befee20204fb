"""The first call of a module, looked at: whether calling it again, as backward does, would be the same call."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.override.live import fqn_of
from pytest_fxbucket.capture.pictures import state_of
from pytest_fxbucket.errors import CaptureError

_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_new(module: nn.Module) -> bool:
    """Whether no call of ``module`` was looked at yet."""
    return module not in _looked_at


@contextmanager
def refuse_remembering(key: str, module: nn.Module) -> Iterator[None]:
    """Raise :class:`CaptureError` if the block, a call of ``module``, changes its Python state; attributes are put back
    then."""
    if not is_new(module):
        yield
        return
    before, attributes = state_of(module), [(inner, dict(vars(inner))) for inner in module.modules()]
    yield
    after = state_of(module)
    for what in [*before, *(what for what in after if what not in before)]:
        if before.get(what) != after.get(what):
            for inner, held in attributes:
                vars(inner).clear()
                vars(inner).update(held)
            raise CaptureError(
                f"module {fqn_of(key)} changes {what.replace('the root module', 'its own')} when it is called, and backward, "
                "where it is called again, would change it once more; give it back from forward"
            )
    _looked_at.add(module)


def refuse_strangers(key: str, results: Sequence[torch.Tensor], twins: Collection[torch.Tensor]) -> None:
    """Raise :class:`CaptureError` if gradients of ``results`` go to another leaf than ``twins``, where they would be lost."""
    known = {id(twin) for twin in twins}
    queue: list[Any] = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(queue)
    for grad_fn in queue:
        variable = getattr(grad_fn, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            raise CaptureError(
                f"module {fqn_of(key)} reads a parameter of shape {tuple(variable.shape)} past its module's attribute, so its "
                "gradient would be lost; read it as the attribute that it was registered as"
            )
        fresh = [child for child, _ in grad_fn.next_functions if child is not None and child not in seen]
        seen.update(fresh)
        queue.extend(fresh)
