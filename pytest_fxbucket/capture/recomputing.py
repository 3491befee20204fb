"""Activation checkpointing while a step is traced: what backward computes again is traced in it, reentrant or not.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the module without a graph of its own and starts a second backward
within the first, whose gradients no traced function can give. The other form computes the same, by saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint as torch_checkpoint

from pytest_fxbucket.compat.checkpoints import caches_unversioned


@contextmanager
def checkpoints_traced(edges: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While inside, checkpoints that are asked to be reentrant are of the other form, with gradients summed as theirs are.

    Inside ``edges()`` each parameter is read behind an :class:`Edge` of its own.
    """
    with patch.object(torch_checkpoint, "CheckpointFunction", _Saved(edges)), caches_unversioned():
        yield


@dataclass(frozen=True, slots=True)
class _Saved:
    """Called as ``CheckpointFunction`` is."""

    edges: Callable[[], AbstractContextManager[None]]

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """What ``function`` gives for ``args``."""
        if not any(map(_has_gradient, args)):
            with torch.no_grad():  # torch warns here, and gives what is in it no gradient
                return function(*args)

        def apart(*args: Any) -> Any:
            with self.edges():
                return function(*args)

        given = [Edge.apply(one) if _has_gradient(one) else one for one in args]  # type: ignore[no-untyped-call]
        return torch_checkpoint.checkpoint(apart, *given, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Edge(torch.autograd.Function):
    """Sums what comes from within a reentrant checkpoint before it meets what comes from elsewhere."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """``value`` itself."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of what came from within."""
        return gradient
