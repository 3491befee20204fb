"""Launches that depend on each other, through readers, writes and other launches: how many buckets they make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from pytest_fxbucket.fuzz.program import COLUMNS, HALVES, Program, aten
from pytest_fxbucket.passes.carried import carried
from suites.passes import programs
from suites.passes.programs import SGD, Passed

Equal = Callable[..., Passed]


def reduced_twice(made: Program, x: fx.Node) -> list[fx.Node]:
    return [made.reduce(made.neg(made.reduce(x)))]


def gathered_twice(made: Program, p: fx.Node) -> list[fx.Node]:
    return [made.gather(made.call(aten.view.default, made.gather(p), [COLUMNS, -1]))]


def all_reduced_twice(made: Program, x: fx.Node) -> list[fx.Node]:
    first = made.all_reduce(x, "avg")
    return [first, made.all_reduce(made.add(first, x), "avg")]


@pytest.mark.parametrize("chain", [reduced_twice, gathered_twice, all_reduced_twice])
def test_a_chain_of_its_own_kind_takes_a_launch_for_each_link(
    made: Program, equal: Equal, chain: Callable[[Program, fx.Node], list[fx.Node]]
) -> None:
    given = made.shards("xy", 2 * made.world**2, COLUMNS)
    assert len(equal([node for one in given for node in chain(made, one)]).launches) == 2


@pytest.mark.parametrize("scatter_first", [True, False])
def test_reductions_of_two_dimensions_keep_their_order(scatter_first: bool) -> None:
    """Hybrid sharding: reduce-scatter, then all-reduce, or the other way round; each merges into one."""
    made = Program(4, HALVES[4])
    steps = [lambda x: made.reduce(x, "sum", "halves"), lambda x: made.all_reduce(x, "avg", "strided")]
    found = []
    for x in made.fulls("xyz", "halves"):
        for step in steps if scatter_first else reversed(steps):
            x = step(made.neg(x))
        found.append(x)
    expected = ["reduce_scatter_tensor", "all_reduce"]
    assert programs.equal(made, found).launches == (expected if scatter_first else expected[::-1])


def test_a_launch_stands_behind_the_most_launches_of_any_way_to_it(made: Program) -> None:
    (x,) = made.fulls("x")
    first = made.all_reduce(x)
    joined = made.call(aten.cat.default, [first, made.all_reduce(first)])
    graph = made.returns(made.all_reduce(joined)).graph
    assert [one.level for one in carried(graph).values()] == [0, 1, 2]


def through_a_reader(made: Program, y: fx.Node, first: fx.Node) -> fx.Node:
    """``y`` plus a number that ``first`` gives."""
    return made.add(y, made.call(aten.sum.default, first))


def through_a_write_in_place(made: Program, y: fx.Node, first: fx.Node) -> fx.Node:
    made.call(aten.copy_.default, made.call(aten.slice.Tensor, y, 0, 0, 2), first)
    return y


@pytest.mark.parametrize("dependent", [through_a_reader, through_a_write_in_place])
def test_what_an_early_result_goes_into_is_sent_behind_it(
    made: Program, equal: Equal, dependent: Callable[[Program, fx.Node, fx.Node], fx.Node]
) -> None:
    x, y, z = made.fulls("xyz")
    first = made.reduce(x)
    passed = equal([first, made.reduce(dependent(made, y, first)), made.reduce(z)])
    assert sorted(len(bucket.members) for bucket in passed.report.buckets) == [1, 2]


@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
def test_each_wait_of_a_launch_gets_its_result(made: Program, equal: Equal, kind: str) -> None:
    x, y = made.fulls("xy")
    twice = getattr(made, f"launch_{kind}")(x)
    first = made.neg(made.wait(twice))
    other = getattr(made, kind)(y)
    assert len(equal([first, other, made.add(made.wait(twice), 1.0)]).launches) == 1


def test_a_shard_gathered_several_times_is_in_as_many_buckets(made: Program, equal: Equal) -> None:
    p, q, x = *made.shards("pq"), *made.fulls("x")
    for shard in (p, q, p, p):
        x = made.add(x, made.gather(shard))
    passed = equal([x])
    assert [bucket.members for bucket in passed.report.buckets] == [("p", "q"), ("p",), ("p",)]
    assert [split.mine for bucket in passed.report.buckets for split in bucket.splits] == ["round 1", "round 2", "round 3"]


@pytest.mark.parametrize("chains", [("ab", "ba"), ("ab", "bc", "ca")])
def test_buckets_that_would_wait_for_each_other_in_a_circle_are_split_once(
    made: Program, equal: Equal, chains: tuple[str, ...]
) -> None:
    """Of two: b's first needs a's first, and a's second needs b's second. A bucket beside them stays whole."""
    found = []
    for modules in chains:
        first, second = made.fulls([f"{modules}{i}" for i in range(2)])
        made.module = modules[0]
        found.append(made.reduce(first))
        made.module = modules[1]
        found.append(made.reduce(through_a_reader(made, second, found[-1])))
    made.module = "beside"
    found += [made.reduce(x) for x in made.fulls("xyz")]
    entries = [*sorted({module for modules in chains for module in modules}), "beside"]
    passed = equal(found, entries)
    assert len(passed.launches) == len(chains) + 2
    assert [len(bucket.members) for bucket in passed.report.buckets if bucket.entry == "beside"] == [3]


def test_buckets_of_different_kinds_that_would_wait_for_each_other_are_split(made: Program, equal: Equal) -> None:
    """A gather of what a reduction wrote, and a reduction of what another gather brought."""
    p, q, x, y = *made.shards("pq"), *made.fulls("xy")
    made.call(aten.sub_.Tensor, p, made.reduce(x))
    gathered = [made.gather(p), made.gather(q)]
    assert len(equal([*gathered, made.reduce(made.add(y, gathered[1]))]).launches) == 3


def test_a_long_chain_beside_free_members_takes_as_few_launches_as_it_is_long(made: Program, equal: Equal) -> None:
    x, found = made.given("x", 2, COLUMNS), []
    for free in made.shards("pqrst"):
        x = made.all_reduce(made.neg(x), "avg")
        found.append(made.all_reduce(free, "avg"))
    assert len(equal([x, *found]).launches) == 5


def by_list(made: Program, shards: list[fx.Node], gradients: list[fx.Node]) -> None:
    made.call(aten._foreach_sub_.List, shards, gradients, alpha=2)


def fused(made: Program, shards: list[fx.Node], gradients: list[fx.Node]) -> None:
    made.call(aten._fused_sgd_.default, shards, gradients, [], **SGD)


def one_by_one(made: Program, shards: list[fx.Node], gradients: list[fx.Node]) -> None:
    for shard, gradient in zip(shards, gradients, strict=True):
        made.call(aten.sub_.Tensor, shard, gradient)


@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
@pytest.mark.parametrize("update", [by_list, fused, one_by_one])
def test_an_optimizer_between_two_steps_in_one_graph_writes_before_the_next_gather(
    made: Program, equal: Equal, kind: str, update: Callable[[Program, list[fx.Node], list[fx.Node]], None]
) -> None:
    """Gather, reduce, update in place, gather again, with nothing returned but the loss; each of the four merges into one."""
    shards, x = made.shards("pq"), made.given("x", 2 * made.world, COLUMNS)
    for _ in range(2):
        made.backward = False
        for shard in shards:
            x = made.call(aten.remainder.Scalar, made.call(aten.mul.Tensor, x, made.gather(shard)), 5.0)
        made.backward = True
        gradients = []
        for _ in shards:
            x = made.neg(x)
            full = getattr(made, kind)(x)
            gradients.append(full if kind == "reduce" else made.call(aten.slice.Tensor, full, 0, 0, 2))
        update(made, shards, gradients)
    assert len(equal([x]).launches) == 4
