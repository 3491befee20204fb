"""What members of one bucket agree in, caps and byte orders, on real ranks before and after the pass, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import Program, equal_with

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])


def of_several_dtypes(made: Program) -> list[fx.Node]:
    dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64]
    shapes = [(1, 3), (5,), (3, 1), (1, 7), (1,), (1, 3)]
    given = [made.given(f"p{i}", *shape, dtype=dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    return [made.gather(node) for node in given]


@WORLDS
def test_members_of_several_dtypes_go_apart(pools: Pools, world: int) -> None:
    assert len(equal_with(pools, Program(world), of_several_dtypes).launches()) == 5


@WORLDS
def test_members_of_several_dtypes_share_a_launch_if_asked(pools: Pools, world: int) -> None:
    """Odd element counts: what comes behind a bfloat16 member must be aligned."""
    passed = equal_with(pools, Program(world), of_several_dtypes, dtypes="mixed")
    assert passed.launches() == ["all_gather_into_tensor"]
    assert passed.report.buckets[0].dtype.count("+") == 4


@WORLDS
def test_reductions_of_several_dtypes_never_share_a_launch(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        nodes = [*made.fulls("xy"), *made.fulls("uv", dtype=torch.bfloat16)]
        return [f(node) for f in (made.reduce, made.all_reduce) for node in nodes]

    assert len(equal_with(pools, Program(world), build, dtypes="mixed").launches()) == 4


@WORLDS
def test_a_cap_counts_the_larger_side_of_a_launch(pools: Pools, world: int) -> None:
    """2 x 3 floats a rank, on each rank: 24 bytes; a bucket of two members fits, one of three does not."""

    def build(made: Program) -> list[fx.Node]:
        return [*(made.gather(p) for p in made.shards("pqrst")), *(made.reduce(x) for x in made.fulls("uvxyz"))]

    cap = 2 * 24 * world / (1 << 20)
    passed = equal_with(pools, Program(world), build, cap_mb=(cap,))
    assert sorted(len(bucket.members) for bucket in passed.report.buckets) == [1, 1, 2, 2, 2, 2]
    assert len(equal_with(pools, Program(world), build, cap_mb=(cap * 0.999,)).launches()) == 10


@WORLDS
def test_neighbours_fill_buckets_without_a_plan(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        return [made.gather(p) for p in made.shards("pqrstuvw")]

    size = 24 * world / (1 << 20)
    passed = equal_with(pools, Program(world), build, by="size", cap_mb=(size, 2 * size, 4 * size))
    assert [len(bucket.members) for bucket in passed.report.buckets] == [1, 2, 4, 1]


@WORLDS
@pytest.mark.parametrize("layout", ["registration", "execution"])
def test_either_byte_order_gives_the_same_values(pools: Pools, world: int, layout: str) -> None:
    def build(made: Program) -> list[fx.Node]:
        return [made.gather(p) for p in reversed(made.shards("pqr"))] + [made.reduce(x) for x in reversed(made.fulls("xyz"))]

    passed = equal_with(pools, Program(world), build, layout=layout)
    (first, _) = passed.report.buckets
    assert first.members == (("p", "q", "r") if layout == "registration" else ("r", "q", "p"))
