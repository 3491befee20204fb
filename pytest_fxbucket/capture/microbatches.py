"""A batch in equal parts on dimension 0 of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_fxbucket.errors import CaptureError


def microbatches(leaves: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """``count`` lists like ``leaves``, each with its rows of every tensor; what is no tensor is in all of them.

    Raises :class:`CaptureError` for a tensor that cannot be cut so.
    """
    if count == 1:
        yield list(leaves)
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise CaptureError(
                f"[step] microbatches = {count} does not divide dimension 0 of a tensor of the batch, "
                f"whose shape is {tuple(leaf.shape)}; use a number that does, or give the batch more rows"
            )
    for number in range(count):
        yield [_rows(leaf, number, count) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _rows(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    rows = tensor.shape[0] // count
    return tensor.narrow(0, number * rows, rows)
