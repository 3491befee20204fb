"""A packer of a user's own: what it is given, what it must give, and what is said when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.passes.new_nodes import NodeMaker
from pytest_fxbucket.passes.packers import Packing, Unpack, packer_named
from suites.passes.packing import assert_same

HERE = "suites.passes.test_packers:"


def joined(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    """Views, one behind the other."""
    parts = [make(aten.reshape.default, tensor, [-1]) for tensor in bucket.inputs]

    def unpack(arrived: fx.Node) -> Sequence[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks, -1])
        pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
        parts = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
        return [make(aten.view.default, part, list(shape)) for part, shape in zip(parts, bucket.shapes, strict=True)]

    return make(aten.cat.default, parts), unpack


def backwards(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    """Reductions of gradients in the opposite byte order, cut by slices."""
    rows = [make(aten.reshape.default, tensor, [max(bucket.ranks, 1), -1]) for tensor in reversed(bucket.inputs)]

    def unpack(arrived: fx.Node) -> Sequence[fx.Node]:
        flat, end, results = make(aten.view.default, arrived, [-1]), sum(map(int, bucket.numels)), []
        for numel, shape in zip(bucket.numels, bucket.shapes, strict=True):
            piece = make(aten.slice.Tensor, flat, 0, end - numel, end)
            results.append(make(aten.view.default, piece, list(shape)))
            end -= numel
        return results

    return make(aten.cat.default, rows, 1), unpack


def flat_backwards(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    return backwards(make, replace(bucket, ranks=1))


def forgets(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    packed, unpack = joined(make, bucket)
    return packed, lambda arrived: unpack(arrived)[1:]


def transposes(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    packed, unpack = joined(make, bucket)
    return packed, lambda arrived: [make(aten.t.default, result) for result in unpack(arrived)]


def strides(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    def unpack(arrived: fx.Node) -> Sequence[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks * 2, -1])
        pieces = make(aten.split_with_sizes.default, rows, [3] * len(bucket.inputs), 1)
        return [make(getitem, pieces, i) for i in range(len(bucket.inputs))]

    return joined(make, bucket)[0], unpack


def miscounts(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    packed = joined(make, bucket)[0]
    return packed, lambda arrived: [make(aten.view.default, arrived, [7])]


def breaks(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    raise KeyError(bucket.kind)


def gives_nothing(make: NodeMaker, bucket: Packing) -> None:
    return None


def returns_nothing(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Any]:
    packed, _ = joined(make, bucket)
    return packed, lambda arrived: None


def gives_values(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Any]:
    packed, unpack = joined(make, bucket)
    return packed, lambda arrived: [one.meta["val"] for one in unpack(arrived)]


def without_value(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    packed, unpack = joined(make, bucket)
    del packed.meta["val"]
    return packed, unpack


def gathers(ranks: int) -> fx.Graph:
    made = Program(ranks)
    return made.returns(*made.together("gather", made.shards("pqr"))).graph


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_go_through_a_packer_of_ones_own(ranks: int) -> None:
    _, built, _ = assert_same(gathers(ranks), ranks, packer=HERE + "joined")
    assert [node.target for node in built.pack] == [aten.reshape.default] * 3 + [aten.cat.default]
    assert aten.split_with_sizes_copy.default in [node.target for node in built.unpack]  # which the default has not


@pytest.mark.parametrize(("form", "packer"), [("reduce", "backwards"), ("all_reduce", "flat_backwards")])
def test_reductions_go_through_a_packer_of_ones_own(form: str, packer: str) -> None:
    made = Program(2)
    tensors = [made.given(f"p{i}", *shape) for i, shape in enumerate([(4, 3), (2, 5), (2,)])]
    assert_same(made.returns(*made.together(form, tensors)).graph, 2, packer=HERE + packer)


def test_a_packer_of_ones_own_sees_the_casts() -> None:
    """Only packers that are known to move elements whole may leave the cast to the packed tensor."""
    made = Program(2)
    halves = [made.call(aten._to_copy.default, tensor, dtype=torch.bfloat16) for tensor in made.shards("pq")]
    _, built, _ = assert_same(made.returns(*made.together("gather", halves)).graph, 2, packer=HERE + "joined")
    assert built.absorbed == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forgets", 'forgets" gave 2 results for 3 inputs'),
        ("transposes", 'transposes" made float32[3, 4], not contiguous, for p, where float32[4, 3] was expected'),
        ("strides", 'strides" made float32[4, 3], not contiguous, for p, where float32[4, 3] was expected'),
        ("miscounts", "aten.view.default cannot be called on what the launches carry: RuntimeError: shape '[7]' is invalid"),
        ("breaks", "breaks\" raised KeyError: 'all_gather'"),
        ("gives_nothing", 'gives_nothing" gave a NoneType, where (packed node, unpack) was expected'),
        ("returns_nothing", 'returns_nothing": unpack gave a NoneType, where a list of nodes was expected'),
        ("gives_values", 'gives_values": unpack gave FakeTensor in its list, where nodes were expected'),
        ("without_value", 'without_value": cat carries no value, and merging needs a fake tensor in its meta'),
    ],
)
def test_a_packer_that_does_not_do_its_work_is_named(name: str, words: str) -> None:
    with pytest.raises(PassError) as caught:
        assert_same(gathers(2), 2, packer=HERE + name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("defualt", 'packer "defualt" is not known: did you mean "default", or name one of your own as "module:callable"'),
        ("fastest", 'packer "fastest" is not known: known: default, or name'),
        (HERE + "join", 'has no "join"; did you mean "joined"?'),
    ],
)
def test_a_packer_that_is_not_there_is_an_error_that_says_the_nearest(name: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        packer_named(name)
    assert words in str(caught.value)
