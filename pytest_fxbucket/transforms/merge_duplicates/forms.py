"""Shape, dtype and place in memory of what nodes give, as text: symbolic sizes cannot be compared for certain."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import collectives

if TYPE_CHECKING:
    from torch import fx


def form_of(node: fx.Node) -> Hashable:
    """Shape, dtype, device and strides of each tensor that ``node`` gives; of a number its type."""
    value = node.meta.get("val")
    return tuple(map(_form, collectives.tensors(value))) or type(value).__name__


def dtype_of(node: fx.Node) -> Hashable:
    """dtype and device of the tensor that ``node`` gives; its type if it gives anything else."""
    value = node.meta.get("val")
    return f"{value.dtype} {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def place_of(node: fx.Node) -> Hashable:
    """:func:`form_of`, and where in its memory the tensor begins that ``node`` gives."""
    value = node.meta.get("val")
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return form_of(node), str(value.storage_offset()) if is_strided else ""  # type: ignore[union-attr]  # a tensor then


def _form(value: torch.Tensor) -> tuple[str, ...]:
    strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
    return str(tuple(value.shape)), str(value.dtype), str(value.device), str(strides)
