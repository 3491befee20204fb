"""How torch groups tensors before foreach calls (``torch.utils._foreach_utils``, in torch 2.11 to 2.14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def grouped(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` by device and dtype, in torch's own order, which is none that one can see."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    return [list(lists[0]) for lists, _ in _group_tensors_by_device_and_dtype([list(tensors)]).values()]  # type: ignore[list-item]
