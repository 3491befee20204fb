"""How the members of a bucket become one tensor, and what arrives becomes members again: the packers, by name.

A packer is a callable ``packer(make, bucket) -> (packed, unpack)``. It makes the nodes of the pack with ``make``, a
:class:`~pytest_fxbucket.passes.new_nodes.NodeMaker`, and gives ``packed``, what the launch sends; ``unpack(arrived)`` makes
the nodes behind the launch's wait and gives one result for each input, contiguous and of the shape that ``bucket.shapes``
says. What arrives is what the functional collective gives: for an all-gather the ranks' ``packed`` one behind the other along
dimension 0, for a reduce-scatter this rank's part of it, for an all-reduce a tensor like it. A graph must be the same on
every rank, so a packer is not told the rank. For example::

    def joined(make, bucket):
        parts = [make(aten.reshape.default, tensor, [-1]) for tensor in bucket.inputs]

        def unpack(arrived):
            rows = make(aten.view.default, arrived, [bucket.ranks, -1])
            pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
            parts = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
            return [make(aten.view.default, part, list(shape)) for part, shape in zip(parts, bucket.shapes)]

        return make(aten.cat.default, parts), unpack
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import getitem
from typing import TYPE_CHECKING, Protocol

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes.new_nodes import alone, fake_value, has_numbers, view_of
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensor
    from pytest_fxbucket.graph.collectives import Kind
    from pytest_fxbucket.passes.new_nodes import NodeMaker

aten = torch.ops.aten
_BYTE = torch.uint8


# The packer that needs no rank, no operator of its own, and none that a later compiler has no code for.
#
# All-gather: shards one behind the other; what arrives is a matrix of shape (ranks, elements of a rank) whose columns are cut
# into members, each in a storage of its own. Reduce-scatter: gradients, each seen as a matrix of shape (ranks, elements of its
# piece), side by side; the piece that arrives is cut into members. All-reduce: gradients one behind the other. Members of
# several dtypes are gathered as bytes, each beginning at a multiple of the largest element, with zeros between them.
#
# Packs are ``cat`` of reshaped members, unpacks views and clones: inductor breaks down what does more at once
# (``flatten_dense_tensors``, ``_chunk_cat``, ``split_with_sizes_copy``, ``new_zeros``) before it asks anybody's pass.


def pack(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    """Pack ``bucket``, of any kind; see :class:`~pytest_fxbucket.passes.packers.Packer`."""
    if bucket.kind == "reduce_scatter":
        return _side_by_side(make, bucket), lambda arrived: cut_views(make, bucket, arrived)
    if bucket.kind == "all_reduce":
        return _behind_each_other(make, bucket), lambda arrived: cut_views(make, bucket, arrived)
    if len(set(bucket.dtypes)) > 1:
        packed, sizes, places = _as_bytes(make, bucket)
        return packed, lambda arrived: _cut_bytes(make, bucket, arrived, sizes, places)
    return _behind_each_other(make, bucket), lambda arrived: cut_columns(make, bucket, arrived)


def _behind_each_other(make: NodeMaker, bucket: Packing) -> fx.Node:
    flat = [node if fake_value(node).dim() == 1 else make(aten.reshape.default, node, [-1]) for node in bucket.inputs]
    return make(aten.cat.default, flat)


def _side_by_side(make: NodeMaker, bucket: Packing) -> fx.Node:
    """Shape (ranks, elements of a piece)."""
    rows = [
        make(aten.reshape.default, node, [bucket.ranks, numel])
        for node, numel in zip(bucket.inputs, bucket.numels, strict=True)
    ]
    return make(aten.cat.default, rows, 1)


def cut_views(make: NodeMaker, bucket: Packing, arrived: fx.Node) -> list[fx.Node]:
    """Views of ``arrived``."""
    flat = make(aten.view.default, arrived, [-1])
    pieces = make(aten.split_with_sizes.default, flat, list(bucket.numels))
    return [_shaped(make, bucket, _item(make, pieces, i), i) for i in range(len(bucket.inputs))]


def cut_columns(make: NodeMaker, bucket: Packing, arrived: fx.Node) -> list[fx.Node]:
    """Copies, each in a storage of its own."""
    pieces = _columns(make, bucket, arrived, bucket.numels, range(len(bucket.inputs)))
    return [_shaped(make, bucket, piece, i) for i, piece in enumerate(pieces)]


def _as_bytes(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, list[int | fx.Node], list[int]]:
    """(packed, sizes, places): the pack as uint8, bytes of each member and each gap of zeros, indices of members there."""
    unit = max(dtype.itemsize for dtype in bucket.dtypes)
    parts: list[fx.Node] = []
    sizes: list[int | fx.Node] = []
    places: list[int] = []
    for node, dtype, numel in zip(bucket.inputs, bucket.dtypes, bucket.numels, strict=True):
        places.append(len(sizes))
        parts.append(_bytes_of(make, node))
        sizes.append(make.times(numel, dtype.itemsize))
        # Each piece ends at a multiple of ``unit``, so that the next member is aligned for its dtype when it is cut out.
        gap = make.missing(sizes[-1], unit) if dtype.itemsize < unit else 0
        if gap != 0:
            parts[-1] = make(aten.constant_pad_nd.default, parts[-1], [0, gap])
            sizes.append(gap)
    return make(aten.cat.default, parts), sizes, places


def _bytes_of(make: NodeMaker, node: fx.Node) -> fx.Node:
    value = fake_value(node)
    # One element is contiguous whatever its strides are, but view.dtype to bytes takes no last stride but 1.
    strided = any(stride != 1 for stride in value.stride()) and value.numel() == 1
    if not has_numbers(value) or not value.is_contiguous() or strided:
        node = make(aten.clone.default, node, memory_format=torch.contiguous_format)
    flat = make(aten.view.default, node, [-1])
    return flat if value.dtype == _BYTE else make(aten.view.dtype, flat, _BYTE)


def _cut_bytes(
    make: NodeMaker, bucket: Packing, arrived: fx.Node, sizes: Sequence[int | fx.Node], places: Sequence[int]
) -> list[fx.Node]:
    pieces = _columns(make, bucket, arrived, sizes, places)
    results = []
    for i, (dtype, piece) in enumerate(zip(bucket.dtypes, pieces, strict=True)):
        if dtype != _BYTE:
            piece = make(aten.view.default, piece, [-1])  # a matrix without elements has strides that view.dtype refuses
            piece = make(aten.view.dtype, piece, dtype)
        results.append(_shaped(make, bucket, piece, i))
    return results


def _columns(
    make: NodeMaker, bucket: Packing, arrived: fx.Node, sizes: Sequence[int | fx.Node], places: Sequence[int]
) -> list[fx.Node]:
    """Cut what arrived, a row for each rank, into columns of ``sizes``; give copies of those at ``places``, the members'."""
    rows = make(aten.view.default, arrived, [bucket.ranks, -1])
    columns = make(aten.split_with_sizes.default, rows, list(sizes), 1)
    return [_copied(make, _item(make, columns, place), old) for place, old in zip(places, bucket.replaced, strict=True)]


def _copied(make: NodeMaker, column: fx.Node, old: FakeTensor) -> fx.Node:
    """A copy of ``column``; its fake value takes over the storage of ``old`` if ``old`` is all that the storage holds."""
    # Views of the old wait carry fake values in that storage, and so remain views of the copy.
    value, clone = fake_value(column), aten.clone.default
    if not alone(old) or not has_numbers(value):
        return make(clone, column, memory_format=torch.contiguous_format)
    return make.holding(view_of(old, value.shape, value.dtype), clone, column, memory_format=torch.contiguous_format)


def _shaped(make: NodeMaker, bucket: Packing, piece: fx.Node, index: int) -> fx.Node:
    """``piece`` in the shape of result ``index``; its fake value is that of the old wait if both share a storage already."""
    view = aten.view.default
    value, old = fake_value(piece), bucket.replaced[index]
    # A symbolic size is a node, and missing here: then the operator itself says what the view holds.
    shape = [size for size in bucket.shapes[index] if isinstance(size, int)]
    if len(shape) < len(bucket.shapes[index]) or not has_numbers(value) or math.prod(shape) != value.numel():
        return make(view, piece, list(bucket.shapes[index]))
    if shape == list(value.shape):
        return piece
    if shape == list(old.shape) and value.dtype == old.dtype and storage_key(value) == storage_key(old):
        return make.holding(old, view, piece, shape)
    return make.holding(view_of(value, shape), view, piece, shape) if value.is_contiguous() else make(view, piece, shape)


def _item(make: NodeMaker, several: fx.Node, place: int) -> fx.Node:
    """Item ``place`` of the list that ``several`` gives; the fake value is the very tensor in that list."""
    return make.holding(several.meta["val"][place], getitem, several, place)


@dataclass(frozen=True, slots=True)
class Packing:
    """What a packer is asked to pack. Sizes are numbers, or nodes that compute symbolic ones."""

    kind: Kind
    """all_gather, reduce_scatter or all_reduce."""
    ranks: int
    """Of the process group; 0 for an all-reduce on a group that this process does not know."""
    inputs: tuple[fx.Node, ...]
    """Tensors to send, in byte order, as they lie: of any strides, empty ones too. ``meta["val"]`` has shape and dtype."""
    dtypes: tuple[torch.dtype, ...]
    """Of each input; several only if the plan says so, and only for an all-gather."""
    numels: tuple[int | fx.Node, ...]
    """Elements of each input in one rank's part: of a shard that is gathered, of the piece that arrives from a reduction."""
    shapes: tuple[tuple[int | fx.Node, ...], ...]
    """Shape of each result."""
    replaced: tuple[FakeTensor, ...]
    """Fake value of the wait that each result takes the place of."""


Unpack = Callable[["fx.Node"], Sequence["fx.Node"]]


class Packer(Protocol):
    """Packs one bucket; called when its launch is built."""

    def __call__(self, make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
        """Make the pack's nodes; give what is sent, and what makes the nodes behind the wait."""


PACKERS: dict[str, Packer] = {"default": pack}


def packer_named(name: str) -> Packer:
    """The packer ``name`` of :data:`PACKERS`, or the callable that ``module:callable`` names.

    Raises :class:`PlanError` if there is none.
    """
    if name in PACKERS:
        return PACKERS[name]
    if ":" in name:
        return import_callable(name, f'packer "{name}"')
    close = get_close_matches(name, PACKERS, n=1)
    hint = f'did you mean "{close[0]}"' if close else f"known: {', '.join(sorted(PACKERS))}"
    raise PlanError(f'packer "{name}" is not known: {hint}, or name one of your own as "module:callable"')
