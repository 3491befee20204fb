"""Fake tensors that lie in memory as the CPU's kernels lay them, where torch's do not; in torch 2.11 to 2.15.

Some pointwise operators have fake results by a decomposition, which takes operands in another order than the kernel does. While
tracing, a reshape becomes a view where strides allow one: by wrong strides the graph then fails on real tensors, or sums in
another order than eager mode does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.dispatch import unseen
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

OTHERWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("_log_softmax_backward_data", "binary_cross_entropy_backward", "copysign", "elu_backward", "floor_divide"),
        *("hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "huber_loss_backward", "log_sigmoid_forward"),
        *("logit_backward", "mse_loss_backward", "native_dropout_backward", "pow", "rrelu_with_noise_backward"),
        *("smooth_l1_loss_backward", "softplus_backward", "special_xlog1py", "xlogy"),
    )
)
"""Each gives tensors of the shape that its operands broadcast to. Found by calling all of aten with transposed operands."""


class KernelFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that asks the kernel itself, on tensors of a few elements, how those operators lay their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if getattr(func, "_schema", None) is None or func._schema.name not in OTHERWISE:
            return given
        operands = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if all(operand.is_contiguous() or operand.device.type != "cpu" for operand in operands):
            return given
        with unseen(), torch.no_grad():
            small = func(*pytree.tree_map(_small, args), **pytree.tree_map(_small, kwargs))
        several = isinstance(given, (tuple, list))
        pairs = zip(given, small, strict=True) if several else [(given, small)]
        laid = tuple(self._laid_as(fake, one) for fake, one in pairs)
        return laid if several else laid[0]

    def _laid_as(self, fake: torch.Tensor, small: torch.Tensor) -> Any:
        strides = _dense(fake.shape, small)
        if strides == list(fake.stride()):
            return fake
        how = {"dtype": fake.dtype, "device": fake.device}
        return super().__torch_dispatch__(torch.ops.aten.empty_strided.default, (), (list(fake.shape), strides), how)


def _small(value: Any) -> Any:
    """Zeros for a fake tensor, in as many dimensions, laid in the same order, but of few elements."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [min(size, 2) for size in value.shape]
    order = sorted(range(value.dim()), key=lambda d: value.stride(d))
    strides, step = [0] * value.dim(), 1
    for d in order:
        strides[d] = step if value.stride(d) or sizes[d] == 1 else 0
        step *= sizes[d] if strides[d] else 1
    return torch.zeros(max(step, 1), dtype=value.dtype).as_strided(sizes, strides)


def _dense(shape: Sequence[int], small: torch.Tensor) -> list[int]:
    """Strides of a tensor of ``shape`` without gaps whose dimensions lie in the order of those of ``small``."""
    strides, step = [1] * len(shape), 1
    for d in sorted(reversed(range(len(shape))), key=small.stride):
        strides[d] = step
        step *= max(shape[d], 1)
    return strides
