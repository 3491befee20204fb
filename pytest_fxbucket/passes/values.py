"""What a new node holds (``meta["val"]``), as a fake tensor.

Calling an operator under a fake mode costs some hundred microseconds. For the operators that packs are made of, and sizes that
are numbers, the value is put together by hand; everything else is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from operator import getitem
from typing import Any

import torch

from pytest_fxbucket.compat.dispatch import python_kernels
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes.fake import fresh, moved, narrowed, seen


def value_of(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``target`` gives for arguments that hold fake tensors; raises :class:`PassError` if it cannot be called on them."""
    if target is getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]  # the very tensor that the list holds
    value = _known(mode, target, args, kwargs)
    return _called(mode, target, args, kwargs) if value is None else value


def _known(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value by hand; None if it is not known."""
    quick = _QUICK.get(str(target))
    if quick is None or not set(kwargs) <= {"dtype", "memory_format"} or not all(isinstance(n, int) for n in _sizes(args)):
        return None
    try:
        return quick(mode, *args, **kwargs)
    except (TypeError, AttributeError, IndexError):  # the operator says better what is wrong with its arguments
        return None


def _called(mode: FakeTensorMode, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator itself, run under ``mode``; what it asks of symbolic sizes is not kept as a guard."""
    from pytest_fxbucket.compat.pytree import tree_map

    args, kwargs = tree_map(lambda a: moved(mode, a) if isinstance(a, FakeTensor) else a, (tuple(args), dict(kwargs)))
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    try:
        with unguarded, python_kernels(), mode:
            return target(*args, **kwargs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise PassError(f"{target} cannot be called on what the launches carry: {type(error).__name__}: {reason}") from error


def _sizes(args: Sequence[Any]) -> Iterator[Any]:
    """All numbers among ``args``, and all sizes of tensors among them."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield from arg.shape
        elif isinstance(arg, (list, tuple)):
            yield from _sizes(arg)
        elif isinstance(arg, (int, torch.SymInt)):
            yield arg


# What each operator gives; None leaves it to the operator itself, which may refuse.


def _joined(mode: FakeTensorMode, tensors: Sequence[FakeTensor], dim: int = 0) -> FakeTensor | None:
    first = tensors[0]
    shapes = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if not 0 <= dim < first.dim() <= 2 or len(shapes) > 1 or len({(t.dim(), t.dtype) for t in tensors}) > 1:
        return None
    shape = [*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :]]
    return fresh(mode, shape, first.dtype, first.device)


def _gathered(mode: FakeTensorMode, value: FakeTensor, ranks: int, group: str) -> FakeTensor | None:
    return fresh(mode, [value.shape[0] * ranks, *value.shape[1:]], value.dtype, value.device) if value.dim() else None


def _scattered(mode: FakeTensorMode, value: FakeTensor, op: str, ranks: int, group: str) -> FakeTensor | None:
    if not value.dim() or value.shape[0] % ranks:
        return None
    return fresh(mode, [value.shape[0] // ranks, *value.shape[1:]], value.dtype, value.device)


def _like(mode: FakeTensorMode, value: FakeTensor, *others: str) -> FakeTensor | None:
    return fresh(mode, value.shape, value.dtype, value.device) if value.is_contiguous() else None


def _viewed(mode: FakeTensorMode, value: FakeTensor, shape: Sequence[int]) -> FakeTensor | None:
    known, numel = math.prod(size for size in shape if size != -1), value.numel()
    shape = [numel // max(known, 1) if size == -1 else size for size in shape]
    return seen(value, shape) if value.is_contiguous() and math.prod(shape) == numel else None


def _retyped(mode: FakeTensorMode, value: FakeTensor, dtype: torch.dtype) -> FakeTensor | None:
    size = value.shape[0] * value.dtype.itemsize if value.dim() == 1 else -1
    begin = int(value.storage_offset()) * value.dtype.itemsize
    if not value.is_contiguous() or size % dtype.itemsize or begin % dtype.itemsize:
        return None
    return seen(value, [size // dtype.itemsize], dtype)


def _split(mode: FakeTensorMode, value: FakeTensor, sizes: Sequence[int], dim: int = 0) -> list[FakeTensor] | None:
    if not 0 <= dim < value.dim() or sum(sizes) != value.shape[dim]:
        return None
    return [narrowed(value, dim, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _cloned(mode: FakeTensorMode, value: FakeTensor, memory_format: torch.memory_format) -> FakeTensor | None:
    if memory_format != torch.contiguous_format:
        return None
    return fresh(mode, value.shape, value.dtype, value.device)


def _cast(mode: FakeTensorMode, value: FakeTensor, dtype: torch.dtype) -> FakeTensor | None:
    return fresh(mode, value.shape, dtype, value.device) if value.is_contiguous() else None


_QUICK: dict[str, Callable[..., Any]] = {
    "aten.cat.default": _joined,
    "aten.clone.default": _cloned,
    "aten.view.default": _viewed,
    "aten.reshape.default": _viewed,
    "aten.view.dtype": _retyped,
    "aten.split_with_sizes.default": _split,
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    "_c10d_functional.all_gather_into_tensor.default": _gathered,
    "_c10d_functional.reduce_scatter_tensor.default": _scattered,
    "_c10d_functional.all_reduce.default": _like,
    "_c10d_functional.wait_tensor.default": _like,
}
