"""Floating point operations of a node, and the bytes that it reads and writes, by its fake values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx
from torch.utils.flop_counter import flop_registry

from pytest_fxbucket.graph.collectives import tensors
from pytest_fxbucket.graph.ops import overload

if TYPE_CHECKING:
    import torch


def flops_of(node: fx.Node) -> int:
    """By torch's table of operators, those of products, convolutions and attention; 0 for others."""
    op = overload(node)
    count = flop_registry.get(op.overloadpacket) if op is not None else None
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def bytes_moved(node: fx.Node) -> int:
    """Bytes of all tensors that ``node`` is given and gives, each once: a row that is expanded counts as one."""
    given = {id(one): one for source in node.all_input_nodes for one in tensors(source.meta.get("val"))}
    return sum(map(_bytes, given.values())) + sum(map(_bytes, tensors(node.meta.get("val"))))


def _bytes(tensor: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(size if stride else min(size, 1))
    return elements * tensor.element_size()
