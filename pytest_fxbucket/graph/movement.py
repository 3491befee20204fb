"""Executes the operators that only move data, on meta tensors, and keeps what their storages hold.

Geometry (shape, strides, offset, storage) comes from running the real operator with the graph's real arguments on the meta
device, never from ``node.meta``: a wrong split size shows, whatever the pass noted about it. Contents are told as runs
(:mod:`pytest_fxbucket.graph.contents`). Every operator here is strided views and copies between them, or made of such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from pytest_fxbucket.compat.pytree import tree_flatten, tree_unflatten
from pytest_fxbucket.compat.torch_pass import numbered_dtypes
from pytest_fxbucket.compat.tracing import trace
from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.contents import NotFollowedError, StorageContents
from pytest_fxbucket.graph.ops import by_operator, is_view_operator, operator_name, overload

if TYPE_CHECKING:
    from torch import fx

_PAD = "aten::constant_pad_nd"
Handler = Callable[[StorageContents, Sequence[Any], dict[str, Any]], Any]


def moves_data(node: fx.Node) -> bool:
    """Whether ``node`` only moves data, so that contents can be followed through it."""
    movement = _movement(node)
    return movement == "moves" or node.target is getitem or (movement == "pads" and _is_bytes(node))


def pads(node: fx.Node) -> bool:
    """Whether ``node`` puts zeros, or another number, around a tensor, or cuts it."""
    return _movement(node) == "pads"


def moves_or_pads(node: fx.Node) -> bool:
    """Whether ``node`` moves data, pads of numbers included: DTensor pads shards, on ranks alone that have too few rows."""
    return _movement(node) != "" or node.target is getitem


def _is_bytes(node: fx.Node) -> bool:
    """Whether ``node`` gives bytes (uint8). Padding bytes aligns members of a pack; padding numbers belongs to the model."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8


def is_new_storage(node: fx.Node) -> bool:
    """Whether ``node`` makes a buffer, of zeros or of nothing."""
    return operator_name(node) in _NEW_STORAGE


def joins(node: fx.Node) -> bool:
    """Whether ``node`` concatenates or pads, which a model may do with its own parameters, too."""
    return operator_name(node) in ("aten::cat", _PAD)


def reorders(node: fx.Node, source: torch.Tensor) -> bool:
    """Whether ``node`` copies its input in another order than the input has in memory, or copies an element several times.

    ``source`` is the input as a meta tensor. No unpacking makes such a copy; a model does, of a weight that it permutes or
    expands.
    """
    if operator_name(node) not in ("aten::clone", "aten::_to_copy"):
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(source.shape, source.stride(), strict=True)):
        return True
    in_order = contents.in_memory_order(source).stride() == source.stride()
    return node.kwargs.get("memory_format") is torch.contiguous_format and not in_order


def execute(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any], memory: StorageContents) -> Any:
    """Result of ``node`` on meta tensors ``args`` and ``kwargs``, whose storages ``memory`` holds.

    Raises :class:`NotFollowedError` for data movement that cannot be told.
    """
    op = overload(node)
    if op is None:
        return args[0][args[1]]
    name = operator_name(node)
    if kwargs:  # Handlers read most arguments by place.
        args, kwargs = _by_place(op, args, kwargs)
    if (handler := _HANDLERS.get(name)) is not None:
        return handler(memory, args, kwargs)
    if _is_made_of_others(op):
        return _by_parts(op, args, kwargs, memory)
    kwargs = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    if name in _NEW_STORAGE:
        kwargs = {**kwargs, "device": torch.device("meta")}
        result = op(*args, **kwargs)
        zero = name.endswith(("zeros", "zeros_like", "new_zeros"))
        memory.define(result, contents.run(contents.ZERO if zero else contents.UNDEFINED, result.nbytes))
        return result
    # What is left are views. On the meta device they share their input's storage, whose content is known. A reshape that
    # cannot be a view has made a new storage.
    result = op(*args, **kwargs)
    if isinstance(result, torch.Tensor) and not memory.knows(result):
        memory.define(result, contents.run(contents.UNDEFINED, result.nbytes))
        memory.copy(_in_shape(result, args[0]), args[0])
    return result


def _is_made_of_others(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` is a custom operator whose kernel for all devices is composed of other operators.

    Tracing decomposes those, so a captured graph has none: where one appears, a packer has put it there.
    """
    return op.namespace not in ("aten", "prims") and op._can_decompose()


def is_made_of_others(node: fx.Node) -> bool:
    """Whether ``node`` calls an operator of somebody's own that is followed through those that it is composed of."""
    op = overload(node)
    return op is not None and _is_made_of_others(op)


def _by_parts(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], memory: StorageContents) -> Any:
    """Trace ``op`` into the operators that it is composed of, and execute each of them."""
    leaves, shape = tree_flatten((list(args), kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        own, named = tree_unflatten(given, shape)
        return op(*own, **named)

    inputs = iter([leaves[place] for place in places])
    values: dict[Any, Any] = {}
    for node in trace(call, [leaves[place] for place in places]).graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
            continue
        given = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return given[0][0]
        if not moves_data(node):
            raise NotFollowedError(f"it is made of {node.target}, which does more than move data")
        values[node] = execute(node, given[0], dict(given[1]), memory)
    raise AssertionError("a graph has an output")


def _in_shape(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The copy ``result`` that a reshape made, seen in the shape of its ``source``."""
    return result if result.shape == source.shape else result.view(source.shape)


def _by_place(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments, with arguments given by name moved to their places as long as none before them is left out."""
    placed, named = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name not in named:
            break
        placed.append(named.pop(argument.name))
    return placed, named


def _clone(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    device, layout = kwargs.get("device"), kwargs.get("layout") or torch.strided
    if layout != torch.strided or (device is not None and torch.device(device).type == "meta"):
        raise NotFollowedError("it copies to where no elements lie side by side")
    dtype = kwargs.get("dtype") or args[0].dtype
    target = torch.empty_like(args[0], dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format)
    memory.define(target, contents.run(contents.UNDEFINED, target.nbytes))
    memory.copy(target, args[0])
    return target


def _convert(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    return _clone(memory, args[:1], {"dtype": args[1]})


def _cat(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    target = torch.empty_like(torch.cat(list(parts), dim), memory_format=torch.contiguous_format)
    # torch.cat skips an empty tensor of shape (0,), whatever dimensions the others have.
    sizes = [0 if part.shape == (0,) else part.shape[dim] for part in parts]
    _fill(memory, target, torch.split(target, sizes, dim), parts)
    return target


def _fill(memory: StorageContents, target: torch.Tensor, places: Iterable[torch.Tensor], parts: Iterable[torch.Tensor]) -> None:
    """Copy each of ``parts`` to its place in the new ``target``, which the places cover completely."""
    # All at once: copying part by part into a bucket would cut and join the runs of the whole content for each member.
    pairs = [(at, part) for at, part in zip(places, parts, strict=True) if part.numel()]
    if other := next((part.shape for at, part in pairs if at.numel() != part.numel()), None):
        raise ValueError(f"a part of shape {tuple(other)} does not fit into {tuple(target.shape)}")
    memory.define(target, contents.filled((at, memory.cast(part, at.dtype)) for at, part in pairs))


def _flatten_dense(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    parts = args[0]
    if len(parts) == 1:
        return _reshaped(memory, parts[0], [-1])
    sizes = [part.numel() for part in parts]
    # As torch.cat, it promotes parts of several dtypes to one.
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    target = torch.empty(sum(sizes), dtype=dtype, device="meta")
    _fill(memory, target, torch.split(target, sizes), parts)
    return target


def _chunk_cat(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    # Each part is padded with zeros along ``dim`` to a multiple of ``chunks`` and cut into as many; behind that, chunk k of all
    # parts lies side by side.
    parts, dim, chunks = args[0], args[1], args[2]
    padded = []
    for part in parts:
        shape = list(part.shape)
        shape[dim] = -(-shape[dim] // chunks) * chunks
        whole = memory.allocate(torch.empty(shape, dtype=part.dtype, device="meta"))
        memory.define(whole, contents.run(contents.ZERO, whole.nbytes))
        memory.copy(whole.narrow(dim, 0, part.shape[dim]), part)
        padded.append(whole.view(*shape[:dim], chunks, -1))
    sizes = [part.shape[-1] for part in padded]
    target = torch.empty([*padded[0].shape[:-1], sum(sizes)], dtype=parts[0].dtype, device="meta")
    _fill(memory, target, torch.split(target, sizes, dim + 1), padded)
    return target


def _pad(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Pads are (before, after) of each dimension, the last one first; below zero they cut."""
    source, pads, value = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("value", 0)
    target = memory.allocate(torch.empty(torch.constant_pad_nd(source, pads).shape, dtype=source.dtype, device="meta"))
    if value != 0 or math.copysign(1, value) < 0:  # -0.0 has other bits
        raise NotFollowedError(f"it pads with {value}")
    memory.define(target, contents.run(contents.ZERO, target.nbytes))
    inner = target
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = source.dim() - 1 - i
        kept = source.shape[dim] + min(before, 0) + min(after, 0)
        source = source.narrow(dim, max(-before, 0), max(kept, 0))
        inner = inner.narrow(dim, max(before, 0), max(kept, 0))
    memory.copy(inner, source)
    return target


def _split_copy(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    pieces = torch.split(args[0], args[1], dim)
    if not kwargs.get("out"):
        return [memory.allocate(piece, memory.read(piece)) for piece in pieces]
    for target, piece in zip(kwargs["out"], pieces, strict=True):
        memory.copy(target.view(piece.shape) if target.numel() == piece.numel() else target, piece)
    return None


def _copy_(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    target: torch.Tensor = args[0]
    memory.copy(target, args[1])
    return target


def _copy(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    target = memory.allocate(args[0])
    memory.copy(target, args[1])
    return target


def _foreach_copy_(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        memory.copy(target, source)


def _pre_bucket_all_gather(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """torch's pack: casts the members into this rank's part of a new buffer, which is as large as the gathered result."""
    parts, ranks, *rest = args
    dtype, numbers, rank = [one for one in rest if not isinstance(one, str)][:3]  # torch 2.12 gives the group's name too
    dtypes = [numbered_dtypes()[number] for number in numbers]
    sizes = [part.numel() * cast.itemsize // dtype.itemsize for part, cast in zip(parts, dtypes, strict=True)]
    whole = memory.allocate(torch.empty(sum(sizes) * ranks, dtype=dtype, device="meta"))
    own = torch.empty(sum(sizes), dtype=dtype, device="meta")
    # A member lies in the bucket in the dtype that it is cast to, which need not be the bucket's.
    places = [at.view(cast).view(part.shape) for at, cast, part in zip(torch.split(own, sizes), dtypes, parts, strict=True)]
    _fill(memory, own, places, parts)
    memory.copy(whole.narrow(0, rank * own.numel(), own.numel()), own)
    return whole


def _pre_bucket_reduce_scatter(memory: StorageContents, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """torch's pack: the members as matrices of (ranks, elements of a piece), side by side."""
    parts, ranks = args
    rows = [_reshaped(memory, part, [ranks, -1]) for part in parts]
    return _cat(memory, [rows, 1], {}).view(-1)


def _reshaped(memory: StorageContents, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    if not tensor.is_contiguous():
        tensor = _clone(memory, [tensor], {"memory_format": torch.contiguous_format})
    return tensor.view(shape)


_HANDLERS: dict[str, Handler] = {
    "aten::clone": _clone,
    "aten::_to_copy": _clone,
    "aten::copy_": _copy_,
    "aten::copy": _copy,
    "aten::_foreach_copy_": _foreach_copy_,
    "aten::cat": _cat,
    "aten::flatten_dense_tensors": _flatten_dense,
    "aten::_chunk_cat": _chunk_cat,
    _PAD: _pad,
    "aten::split_with_sizes_copy": _split_copy,
    "prims::convert_element_type": _convert,
    "bucketing::_pre_bucket_all_gather": _pre_bucket_all_gather,
    "bucketing::_pre_bucket_reduce_scatter": _pre_bucket_reduce_scatter,
}

_NEW_STORAGE = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::zeros", "aten::new_zeros"})


def _movement_of(op: torch._ops.OpOverload) -> str:
    if op._schema.name == _PAD:
        return "pads"
    known = op._schema.name in _NEW_STORAGE or op._schema.name in _HANDLERS
    return "moves" if known or is_view_operator(op) or _is_made_of_others(op) else ""


_movement = by_operator(_movement_of, "")
