"""A packer as users write them, different from this package's own: it copies where that one uses views."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.new_nodes import NodeMaker
    from pytest_fxbucket.passes.packers import Packing, Unpack

aten = torch.ops.aten
JOINED = "pytest_fxbucket.fuzz.users_packer:joined"
"""The value of ``packer`` that names it."""


def joined(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    """Members of one dtype, one behind the other in each rank's row."""
    reduces = bucket.kind == "reduce_scatter"
    numels = zip(bucket.inputs, bucket.numels, strict=True)
    parts = [make(aten.reshape.default, tensor, [bucket.ranks, numel] if reduces else [-1]) for tensor, numel in numels]

    def unpack(arrived: fx.Node) -> Sequence[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks if bucket.kind == "all_gather" else 1, -1])
        pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
        copies = [make(getitem, pieces, i) for i in range(len(parts))]
        return [make(aten.view.default, copy, list(shape)) for copy, shape in zip(copies, bucket.shapes, strict=True)]

    return make(aten.cat.default, parts, int(reduces)), unpack
