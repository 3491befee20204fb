"""Members that depend on each other end in different launches, as few as can be; on real ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import COLUMNS, Program, aten, equal, two_groups

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])
Build = Callable[[Program], list[fx.Node]]


def both(build: Callable[[Program, fx.Node], list[fx.Node]], *shape: int) -> Build:
    """The same for two inputs of ``shape``; -1 stands for twice the world's square."""

    def made(program: Program) -> list[fx.Node]:
        sizes = [2 * program.world**2 if size == -1 else size for size in shape]
        return [node for given in program.shards("xy", *sizes) for node in build(program, given)]

    return made


def reduced_twice(made: Program, x: fx.Node) -> list[fx.Node]:
    return [made.reduce(made.neg(made.reduce(x)))]


def reduced_twice_at_once(made: Program, x: fx.Node) -> list[fx.Node]:
    return [made.reduce(made.reduce(x))]


def gathered_twice(made: Program, p: fx.Node) -> list[fx.Node]:
    return [made.gather(made.call(aten.view.default, made.gather(p), [COLUMNS, -1]))]


def all_reduced_twice(made: Program, x: fx.Node) -> list[fx.Node]:
    first = made.all_reduce(x, "avg")
    return [first, made.all_reduce(made.add(first, x), "avg")]


@WORLDS
@pytest.mark.parametrize(
    "build",
    [
        both(reduced_twice, -1, COLUMNS),
        both(reduced_twice_at_once, -1, COLUMNS),
        both(gathered_twice, 2, COLUMNS),
        both(all_reduced_twice, 2, COLUMNS),
    ],
    ids=["reduced", "reduced_at_once", "gathered", "all_reduced"],
)
def test_a_chain_of_its_own_kind_takes_a_launch_for_each_link(pools: Pools, world: int, build: Build) -> None:
    made = Program(world)
    assert len(equal(pools, made, build(made)).launches()) == 2


@WORLDS
@pytest.mark.parametrize("scatter_first", [True, False])
def test_reductions_of_two_dimensions_keep_their_order(pools: Pools, world: int, scatter_first: bool) -> None:
    """Hybrid sharding: reduce-scatter, then all-reduce, or the other way round; each merges into one."""
    groups, inner, outer = two_groups(world)
    made = Program(world, groups)
    steps = [lambda x: made.reduce(x, "sum", inner), lambda x: made.all_reduce(x, "avg", outer)]
    found = []
    for x in made.fulls("xyz", inner):
        for step in steps if scatter_first else reversed(steps):
            x = step(made.neg(x))
        found.append(x)
    expected = ["reduce_scatter_tensor", "all_reduce"]
    assert equal(pools, made, found).launches() == (expected if scatter_first else expected[::-1])


@WORLDS
def test_gathers_of_two_dimensions_merge_into_one_each(pools: Pools, world: int) -> None:
    groups, inner, outer = two_groups(world)
    made = Program(world, groups)
    found = [made.neg(made.gather(made.gather(p, inner), outer)) for p in made.shards("pqr")]
    passed = equal(pools, made, found)
    assert [bucket.group for bucket in passed.report.buckets] == [inner, outer]
    assert len(passed.launches()) == 2


@WORLDS
def test_opposite_nesting_of_two_groups_splits_one_bucket_alone(pools: Pools, world: int) -> None:
    groups, inner, outer = two_groups(world)
    made = Program(world, groups)
    x, y = made.shards("xy", 2 * world * world, COLUMNS)
    found = [made.reduce(made.reduce(x, "sum", inner), "sum", outer), made.reduce(made.reduce(y, "sum", outer), "sum", inner)]
    assert len(equal(pools, made, found).launches()) == 3


@WORLDS
def test_a_reader_of_an_early_result_that_feeds_a_later_member_parts_them(pools: Pools, world: int) -> None:
    made = Program(world)
    x, y, z = made.fulls("xyz")
    first = made.reduce(x)
    fed = made.add(y, made.call(aten.sum.default, first))
    found = [first, made.reduce(fed), made.reduce(z)]
    passed = equal(pools, made, found)
    assert sorted(len(bucket.members) for bucket in passed.report.buckets) == [1, 2]


@WORLDS
def test_a_reader_of_an_early_result_goes_behind_the_merged_launch(pools: Pools, world: int) -> None:
    made = Program(world)
    x, y = made.fulls("xy")
    first = made.neg(made.reduce(x))
    assert len(equal(pools, made, [made.add(first, made.reduce(y))]).launches()) == 1


@WORLDS
def test_a_reader_between_two_gathers_goes_behind_the_merged_launch(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q, x = *made.shards("pq"), *made.fulls("x")
    x = made.add(x, made.gather(p))
    assert len(equal(pools, made, [made.add(x, made.gather(q))]).launches()) == 1


@WORLDS
@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_each_wait_of_a_launch_gets_its_result(pools: Pools, world: int, kind: str) -> None:
    made = Program(world)
    launch, alone = getattr(made, f"launch_{kind}"), getattr(made, kind)
    x, y = made.fulls("xy")
    twice = launch(x)
    first = made.neg(made.wait(twice))
    other = alone(y)
    found = [first, other, made.add(made.wait(twice), 1.0)]
    assert len(equal(pools, made, found).launches()) == 1


@WORLDS
def test_a_shard_gathered_several_times_is_in_as_many_buckets(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q, x = *made.shards("pq"), *made.fulls("x")
    for shard in (p, q, p, p):
        x = made.add(x, made.gather(shard))
    passed = equal(pools, made, [x])
    assert [bucket.members for bucket in passed.report.buckets] == [("p", "q"), ("p",), ("p",)]
    assert [split.mine for bucket in passed.report.buckets for split in bucket.splits] == ["round 1", "round 2", "round 3"]


def summed(made: Program, full: fx.Node, result: fx.Node) -> fx.Node:
    """``full`` plus a number that ``result`` gives."""
    return made.add(full, made.call(aten.sum.default, result))


@WORLDS
def test_two_buckets_that_would_wait_for_each_other_are_split_once(pools: Pools, world: int) -> None:
    """b1 needs a1, a2 needs b2."""
    made = Program(world)
    a1, b1, b2, a2 = made.fulls("xyzw")
    found = []
    for first, second, modules in ((a1, b1, "ab"), (b2, a2, "ba")):
        made.module = modules[0]
        found.append(made.reduce(first))
        made.module = modules[1]
        found.append(made.reduce(summed(made, second, found[-1])))
    assert len(equal(pools, made, found, ["a", "b"]).launches()) == 3


@WORLDS
def test_a_circle_of_three_buckets_is_split_once(pools: Pools, world: int) -> None:
    made = Program(world)
    found = []
    for modules in ("ab", "bc", "ca"):
        first, second = made.fulls([f"{modules}{i}" for i in range(2)])
        made.module = modules[0]
        found.append(made.reduce(first))
        made.module = modules[1]
        found.append(made.reduce(summed(made, second, found[-1])))
    assert len(equal(pools, made, found, ["a", "b", "c"]).launches()) == 4


@WORLDS
def test_buckets_of_different_kinds_that_would_wait_for_each_other_are_split(pools: Pools, world: int) -> None:
    """A gather of what a reduction wrote, and a reduction of what another gather brought."""
    made = Program(world)
    p, q, x, y = *made.shards("pq"), *made.fulls("xy")
    made.call(aten.sub_.Tensor, p, made.reduce(x))
    gathered = [made.gather(p), made.gather(q)]
    found = [*gathered, made.reduce(made.add(y, gathered[1]))]
    assert len(equal(pools, made, found).launches()) == 3


@WORLDS
def test_dependence_through_a_write_in_place_parts_members(pools: Pools, world: int) -> None:
    made = Program(world)
    x, y, z = made.fulls("xyz")
    first = made.reduce(x)
    rows = made.call(aten.slice.Tensor, y, 0, 0, 2)
    made.call(aten.copy_.default, rows, first)
    passed = equal(pools, made, [first, made.reduce(y), made.reduce(z)])
    assert sorted(len(bucket.members) for bucket in passed.report.buckets) == [1, 2]


@WORLDS
def test_a_long_chain_beside_free_members_takes_as_few_launches_as_it_is_long(pools: Pools, world: int) -> None:
    made = Program(world)
    x, found = made.given("x", 2, COLUMNS), []
    for free in made.shards("pqrst"):
        x = made.all_reduce(made.neg(x), "avg")
        found.append(made.all_reduce(free, "avg"))
    assert len(equal(pools, made, [x, *found]).launches()) == 5
