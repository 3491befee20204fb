"""Where in its memory a node's tensor lies, by its fake value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx


def same_place(owner: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are the same elements in the same order of one memory."""
    if owner is other:
        return True
    a, b = owner.meta.get("val"), other.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _layout(a) == _layout(b)


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


def overlap(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes of one memory may have an element in common: by the first and the last of each."""
    (low, high), (low_2, high_2) = _extent(one.meta["val"]), _extent(other.meta["val"])
    return low < high_2 and low_2 < high


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """First element of ``value`` in its storage, and the one after its last."""
    first = int(value.storage_offset())
    if value.numel() == 0:
        return first, first
    return first, first + 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
