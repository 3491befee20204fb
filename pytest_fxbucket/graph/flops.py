"""Floating point operations of a node, and the bytes of its result, by its fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from pytest_fxbucket.graph.collectives import tensors
from pytest_fxbucket.graph.ops import by_operator, overload

# A step for a GPU is traced on a CPU, whose attention torch's table does not have.
_aten = torch.ops.aten
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def flops_of(node: fx.Node) -> int:
    """Floating point operations by torch's table, which has products, convolutions and attention; 0 for other operators."""
    op = overload(node)
    count = _count_of(op) if op is not None else None
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def counts_flops(node: fx.Node) -> bool:
    """Whether torch's table has ``node``'s operator."""
    return _counts(node)


def _count_of(op: torch._ops.OpOverload) -> Any:
    return flop_registry.get(_LIKE.get(op.overloadpacket, op.overloadpacket))


_counts = by_operator(lambda op: _count_of(op) is not None, False)


def bytes_of(node: fx.Node) -> int:
    """Bytes of the elements of ``node``'s result; elements of an expanded dimension (stride 0) count once."""
    return sum(map(_bytes, tensors(node.meta.get("val"))))


def _bytes(tensor: torch.Tensor) -> int:
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    elements = 1
    for size, stride in zip(tensor.shape, strides, strict=True):
        elements *= int(size if stride else min(size, 1))
    return elements * tensor.element_size()
