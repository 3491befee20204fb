"""Fake tensors put together by hand: shape, dtype, device, and which storage, at a tenth of what calling an operator costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.c10d import without_dispatch_modes
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.errors import PassError

if TYPE_CHECKING:
    from torch import fx

Shape = Sequence[int]


def fake_value(node: fx.Node) -> FakeTensor:
    """The fake tensor that ``node`` carries; raises :class:`PassError` if it carries none."""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        raise PassError(f"{node.name} carries {_kind(value)}, and merging needs a fake tensor in its meta['val']")
    return value


def fresh(mode: FakeTensorMode, shape: Shape, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """A contiguous fake tensor in a storage of its own."""
    with without_dispatch_modes():
        return FakeTensor(mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), device)


def seen(value: FakeTensor, shape: Shape, dtype: torch.dtype | None = None, offset: int = 0) -> FakeTensor:
    """A contiguous view in ``value``'s storage, ``offset`` elements behind the first of ``value``."""
    dtype = dtype or value.dtype
    start = int(value.storage_offset()) * value.dtype.itemsize // dtype.itemsize + offset
    return _strided(value, value.fake_mode, dtype, start, tuple(shape), _contiguous_strides(shape))


def narrowed(value: FakeTensor, dim: int, begin: int, size: int) -> FakeTensor:
    """The ``size`` elements of ``value`` from ``begin`` on along ``dim``, in its storage."""
    start = int(value.storage_offset()) + begin * int(value.stride(dim))
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    return _strided(value, value.fake_mode, value.dtype, start, shape, value.stride())


def alone(value: FakeTensor) -> bool:
    """Whether ``value`` is contiguous, and all that its storage holds."""
    return (
        has_numbers(value)
        and value.is_contiguous()
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    )


def has_numbers(value: torch.Tensor) -> bool:
    """Whether no size of ``value`` is symbolic."""
    return all(isinstance(size, int) for size in value.shape)


def moved(mode: FakeTensorMode, value: FakeTensor) -> FakeTensor:
    """``value`` in ``mode``: a graph traced with real tensors has a mode a node."""
    if value.fake_mode is mode:
        return value
    return _strided(value, mode, value.dtype, int(value.storage_offset()), tuple(value.shape), value.stride())


def _strided(
    value: FakeTensor, mode: FakeTensorMode, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: Shape
) -> FakeTensor:
    storage = value.untyped_storage()
    with without_dispatch_modes():
        meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, tuple(strides))
        return FakeTensor(mode, meta, value.device)


def _contiguous_strides(shape: Shape) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


def _kind(value: object) -> str:
    return "no value" if value is None else f"a {type(value).__name__}"
