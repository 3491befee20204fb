"""Values that no step's data holds by itself, and that a pass may lose: zeros of both signs, denormals, large numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Value

FEWEST_STEPS = 3
"""With fewer steps none is on edge values: they may saturate whatever the model computes."""


def is_on_edges(step: int, steps: int) -> bool:
    """Whether ``step``, from 0, of ``steps`` is the one on edge values."""
    return steps >= FEWEST_STEPS and step == steps - 1


def put_edges(tensors: Sequence[torch.Tensor], values: Sequence[Value] | None = None) -> None:
    """Overwrite the first elements of each floating tensor in place; with ``values``, one for each tensor, of parameters alone.

    Ranks that hold the same part of a parameter hold the same afterwards.
    """
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and (values is None or values[index].role == "param"):
            flat = tensor.detach().flatten()
            tiny = torch.finfo(tensor.dtype).tiny
            edges = torch.tensor(
                [-0.0, 0.0, tiny / 4, -tiny / 2, 2.0**20, -(2.0**15)], dtype=tensor.dtype, device=tensor.device
            )
            count = min(len(edges), flat.numel())
            flat[:count] = edges[:count]
            tensor.detach().copy_(flat.view(tensor.shape))
