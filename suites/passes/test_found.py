"""What random graphs brought to light (suites/fuzz), each as the smallest graph that shows it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from suites.fuzz.hunt import problems
from suites.passes.programs import Program, aten, equal_with, run_pass, through

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])


def changed_again(made: Program, *nodes: fx.Node, entries: Sequence[str] = ("a",)) -> bool:
    """Whether the pass changes its own output."""
    passed = through(made, made.returns(*nodes), entries)
    before = str(passed.after.graph)
    run_pass(passed.after.graph, entries)
    return str(passed.after.graph) != before


@WORLDS
def test_a_plan_on_a_graph_that_is_bucketed_already_finds_its_buckets(world: int) -> None:
    """Merged launches named no module, so every entry was refused the second time."""
    made = Program(world)
    assert not changed_again(made, *(made.gather(p) for p in made.shards("pq")))


@WORLDS
def test_a_gather_of_what_was_written_behind_a_pack_does_not_join_that_bucket_later(world: int) -> None:
    """Once packed, a shard may be written before its bucket is launched: its second gather needs no bucket's result then."""
    made = Program(world)
    p, q = made.shards("pq")
    first, other = made.gather(p), made.gather(q)
    made.call(aten.add_.Tensor, p, 1.0)
    assert not changed_again(made, first, other, made.gather(p))


@WORLDS
def test_both_waits_of_a_launch_are_deferred_in_one_go(world: int) -> None:
    """The second stood in the first one's way, and went; so the next run of the pass moved the first."""
    made = Program(world)
    x, y = made.fulls("xy")
    launch = made.launch_reduce(x)
    first = made.call(aten.add_.Tensor, made.wait(launch), 1.0)
    second = made.wait(launch)
    made.module = "b"
    assert not changed_again(made, first, second, made.reduce(y), entries=["a", "b"])


def test_a_graph_that_reduces_an_empty_tensor_can_be_read() -> None:
    made = Program(3)
    gm = made.returns(made.reduce(made.given("p", 0, 3)))
    assert problems(made, gm.graph) == []


@WORLDS
@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_one_member_is_sent_on_while_another_is_written(pools: Pools, world: int, kind: str) -> None:
    """They lie side by side once they share a bucket, and are no buffer of each other's launches."""

    def build(made: Program) -> list[fx.Node]:
        x, y = made.shards("xy", world * world, 3)
        first, second = getattr(made, kind)(x), getattr(made, kind)(y)
        launch = getattr(made, f"launch_{kind}")(made.call(aten.view.default, first, list(first.meta["val"].shape)))
        made.call(aten.add_.Tensor, second, 1.0)
        return [made.wait(launch), second]

    made = Program(world)
    passed = equal_with(pools, made, build)
    assert len(passed.launches()) == 2
    assert problems(made, passed.before.graph) == []
    assert problems(made, passed.after.graph) == []


@WORLDS
def test_one_element_of_another_stride_is_reduced_in_place(pools: Pools, world: int) -> None:
    """It counts as contiguous, yet cannot be seen as bytes as it is; ranks that reduce in order do just that."""

    def build(made: Program) -> list[fx.Node]:
        one = made.call(aten.select.int, made.given("x", 1, 5), 1, 2)
        return [made.all_reduce_in_place(one)]

    equal_with(pools, Program(world), build)


@WORLDS
def test_one_element_of_another_stride_shares_a_launch_with_other_dtypes(pools: Pools, world: int) -> None:
    def build(made: Program) -> list[fx.Node]:
        one = made.call(aten.select.int, made.given("x", 1, 5), 1, 2)
        return [made.gather(one), *(made.gather(q) for q in made.shards("q", dtype=torch.bfloat16))]

    passed = equal_with(pools, Program(world), build, dtypes="mixed")
    assert len(passed.launches()) == 1
