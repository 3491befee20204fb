"""Activation checkpointing while a step is traced: what backward computes again is traced in it, reentrant or not.

``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the module without a graph of its own and starts a second backward
within the first, whose gradients no traced function can give. The other form computes the same, by saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint as torch_checkpoint


@contextmanager
def reentrant_as_saved() -> Iterator[None]:
    """While inside, checkpoints that are asked to be reentrant are of the other form, with gradients summed as theirs are."""
    with patch.object(torch_checkpoint, "CheckpointFunction", _Saved):
        yield


class _Saved:
    """Called as ``CheckpointFunction`` is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(one, torch.Tensor) and one.requires_grad for one in args):
            with torch.no_grad():  # torch warns here, and gives what is in it no gradient
                return function(*args)
        given = [_Edge.apply(one) if isinstance(one, torch.Tensor) and one.requires_grad else one for one in args]  # type: ignore[no-untyped-call]
        return torch_checkpoint.checkpoint(function, *given, use_reentrant=False, preserve_rng_state=preserve_rng_state)


class _Edge(torch.autograd.Function):
    """Sums what comes from within before it meets what comes from elsewhere."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
