"""The packer that needs no rank and no operator of its own.

All-gather: shards one behind the other (``flatten_dense_tensors``); what arrives is a matrix of shape (ranks, elements of a
rank) whose columns are cut into members, each in a storage of its own. Reduce-scatter: gradients, each seen as a matrix of
shape (ranks, elements of its piece), side by side (``_chunk_cat``); the piece that arrives is cut into members. All-reduce:
gradients one behind the other. Members of several dtypes are gathered as bytes, each beginning at a multiple of the largest
element, with zeros between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.passes.fake import alone, fake_value, fresh, has_numbers, seen

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensor
    from pytest_fxbucket.passes.making import Maker
    from pytest_fxbucket.passes.packers import Bucket, Unpack

_BYTE = torch.uint8


def pack(make: Maker, bucket: Bucket) -> tuple[fx.Node, Unpack]:
    """Pack ``bucket``, of any kind; see :class:`~pytest_fxbucket.passes.packers.Packer`."""
    if bucket.kind == "reduce_scatter":
        return _side_by_side(make, bucket), lambda arrived: cut_views(make, bucket, arrived)
    if bucket.kind == "all_reduce":
        return _behind_each_other(make, bucket), lambda arrived: cut_views(make, bucket, arrived)
    if len(set(bucket.dtypes)) > 1:
        packed, sizes, places = _as_bytes(make, bucket)
        return packed, lambda arrived: _cut_bytes(make, bucket, arrived, sizes, places)
    return _behind_each_other(make, bucket), lambda arrived: cut_columns(make, bucket, arrived)


def _behind_each_other(make: Maker, bucket: Bucket) -> fx.Node:
    aten = torch.ops.aten
    if len(bucket.inputs) == 1:  # flatten_dense_tensors gives a view of a single tensor
        return make(aten.cat.default, [make(aten.reshape.default, bucket.inputs[0], [-1])])
    return make(aten.flatten_dense_tensors.default, list(bucket.inputs))


def _side_by_side(make: Maker, bucket: Bucket) -> fx.Node:
    """Shape (ranks, elements of a piece)."""
    values = [fake_value(node) for node in bucket.inputs]
    if all(has_numbers(value) and value.numel() for value in values):
        return make(torch.ops.aten._chunk_cat.default, list(bucket.inputs), 0, bucket.ranks)
    rows = [  # _chunk_cat refuses empty tensors, and what is symbolic may be empty
        make(torch.ops.aten.reshape.default, node, [bucket.ranks, numel])
        for node, numel in zip(bucket.inputs, bucket.numels, strict=True)
    ]
    return make(torch.ops.aten.cat.default, rows, 1)


def cut_views(make: Maker, bucket: Bucket, arrived: fx.Node) -> list[fx.Node]:
    """Views of ``arrived``."""
    flat = make(torch.ops.aten.view.default, arrived, [-1])
    pieces = make(torch.ops.aten.split_with_sizes.default, flat, list(bucket.numels))
    return [_shaped(make, bucket, _item(make, pieces, i), i) for i in range(len(bucket.inputs))]


def cut_columns(make: Maker, bucket: Bucket, arrived: fx.Node) -> list[fx.Node]:
    """Copies, each in a storage of its own."""
    pieces = _columns(make, bucket, arrived, bucket.numels, range(len(bucket.inputs)))
    return [_shaped(make, bucket, piece, i) for i, piece in enumerate(pieces)]


def _as_bytes(make: Maker, bucket: Bucket) -> tuple[fx.Node, list[int | fx.Node], list[int]]:
    """(packed, sizes, places): uint8, ``sizes`` of members and of zeros between them, and where the members stand in them."""
    unit = max(dtype.itemsize for dtype in bucket.dtypes)
    parts: list[fx.Node] = []
    sizes: list[int | fx.Node] = []
    places: list[int] = []
    zeros: dict[object, fx.Node] = {}
    for node, dtype, numel in zip(bucket.inputs, bucket.dtypes, bucket.numels, strict=True):
        places.append(len(sizes))
        parts.append(_bytes_of(make, node))
        sizes.append(make.times(numel, dtype.itemsize))
        gap = make.missing(sizes[-1], unit) if dtype.itemsize < unit else 0
        if gap != 0:
            if gap not in zeros:
                zeros[gap] = make(torch.ops.aten.new_zeros.default, parts[-1], [gap])
            parts.append(zeros[gap])
            sizes.append(gap)
    return make(torch.ops.aten.cat.default, parts), sizes, places


def _bytes_of(make: Maker, node: fx.Node) -> fx.Node:
    aten, value = torch.ops.aten, fake_value(node)
    if not has_numbers(value) or not value.is_contiguous():
        node = make(aten.contiguous.default, node)
    elif any(stride != 1 for stride in value.stride()) and value.numel() == 1:  # contiguous all the same, but no bytes
        node = make(aten.clone.default, node, memory_format=torch.contiguous_format)
    flat = make(aten.view.default, node, [-1])
    return flat if value.dtype == _BYTE else make(aten.view.dtype, flat, _BYTE)


def _cut_bytes(
    make: Maker, bucket: Bucket, arrived: fx.Node, sizes: Sequence[int | fx.Node], places: Sequence[int]
) -> list[fx.Node]:
    aten = torch.ops.aten
    pieces = _columns(make, bucket, arrived, sizes, places)
    results = []
    for i, (dtype, piece) in enumerate(zip(bucket.dtypes, pieces, strict=True)):
        if dtype != _BYTE:
            piece = make(aten.view.default, piece, [-1])  # a matrix without elements has strides that view.dtype refuses
            piece = make(aten.view.dtype, piece, dtype)
        results.append(_shaped(make, bucket, piece, i))
    return results


def _columns(
    make: Maker, bucket: Bucket, arrived: fx.Node, sizes: Sequence[int | fx.Node], places: Sequence[int]
) -> list[fx.Node]:
    """Copies of the columns of what arrived, a row for each rank: the members', which are at ``places`` among ``sizes``."""
    aten = torch.ops.aten
    rows = make(aten.view.default, arrived, [bucket.ranks, -1])
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes):  # torch's fake values of split_with_sizes_copy know no symbolic sizes
        columns = make(aten.split_with_sizes.default, rows, list(sizes), 1)
        pieces = [_item(make, columns, place) for place in places]
        return [make(aten.clone.default, piece, memory_format=torch.contiguous_format) for piece in pieces]
    copy = aten.split_with_sizes_copy.default
    if all(alone(value) for value in bucket.replaced):
        columns = make.holding(_held(bucket, fake_value(rows), numbers, places), copy, rows, numbers, 1)
    else:
        columns = make(copy, rows, numbers, 1)
    return [_item(make, columns, place) for place in places]


def _held(bucket: Bucket, rows: FakeTensor, sizes: Sequence[int], places: Sequence[int]) -> list[FakeTensor]:
    """What copies of columns hold: the very storages that the results then have; zeros are nobody's."""
    member = dict(zip(places, bucket.replaced, strict=True))
    return [
        seen(member[place], [bucket.ranks, size], rows.dtype)
        if place in member
        else fresh(rows.fake_mode, [bucket.ranks, size], rows.dtype, rows.device)
        for place, size in enumerate(sizes)
    ]


def _shaped(make: Maker, bucket: Bucket, piece: fx.Node, index: int) -> fx.Node:
    """``piece`` in the shape of result ``index``, which is the old one where that is a view of what ``piece`` holds."""
    view = torch.ops.aten.view.default
    value, old = fake_value(piece), bucket.replaced[index]
    shape = [size for size in bucket.shapes[index] if isinstance(size, int)]
    if len(shape) < len(bucket.shapes[index]) or not has_numbers(value) or math.prod(shape) != value.numel():
        return make(view, piece, list(bucket.shapes[index]))
    if shape == list(value.shape):
        return piece
    if shape == list(old.shape) and value.dtype == old.dtype and storage_key(value) == storage_key(old):
        return make.holding(old, view, piece, shape)
    return make.holding(seen(value, shape), view, piece, shape) if value.is_contiguous() else make(view, piece, shape)


def _item(make: Maker, several: fx.Node, place: int) -> fx.Node:
    """Of what ``several`` gives the one at ``place``, the very tensor."""
    return make.holding(several.meta["val"][place], getitem, several, place)
