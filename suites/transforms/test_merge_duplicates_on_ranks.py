"""Merged graphs and merged captured steps on real ranks: every bit is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates
from suites.passes.on_ranks import compare, copied
from suites.passes.programs import Program, aten, c10d
from suites.transforms.duplicates import launches, step_of

ROOT = Path(__file__).resolve().parents[2]
WORLDS = pytest.mark.parametrize("world", [2, 3])


def counts(pools: Pools, made: Program, nodes: list[fx.Node]) -> tuple[int, int]:
    """Launches before and after; fails unless the ranks get the same bits from both."""
    before = made.returns(*nodes)
    after = copied(before)
    merge_duplicates(step_of(after), {})
    assert compare(pools, before, after, made.world, groups=made.groups) == []
    return len(launches(before)), len(launches(after))


@WORLDS
def test_every_kind_is_merged_to_the_same_bits(pools: Pools, world: int) -> None:
    made = Program(world)
    x = made.given("x", 2 * world, 3)
    flat = made.call(aten.view.default, made.call(aten.detach.default, x), [-1])
    results = [make(value) for value in (x, flat) for make in (made.gather, made.reduce, made.all_reduce)]
    for value in (x, made.call(aten.detach.default, x)):
        sizes = [2] * world
        results.append(made.wait(made.call(c10d.all_to_all_single.default, value, sizes, sizes, "0")))
        results.append(made.wait(made.call(c10d.broadcast.default, value, 1, "0")))
    assert counts(pools, made, results) == (10, 5)


@WORLDS
def test_a_captured_step_that_merges_trains_as_eager_does(pools: Pools, world: int) -> None:
    found = pools.get(world).run(
        "suites.transforms.duplicate_jobs:steps", [{"steps": 2}] * world, timeout_s=60, paths=[str(ROOT)]
    )
    assert all(one == found[0] for one in found)
    (before, _), (after, (told,)), (again, _) = found[0]
    assert before == {"all_gather": 5, "reduce_scatter": 4}
    assert after == again == {"all_gather": 2, "reduce_scatter": 4}
    assert told.done == (
        "all_gather of layer.weight (forward): 3 launches are 1",
        "all_gather of layer.bias (forward): 2 launches are 1",
    )
    assert told.left == ()


def test_a_captured_step_that_adds_before_reducing_is_apart_by_rounding_alone(pools: Pools) -> None:
    found = pools.get(3).run("suites.transforms.duplicate_jobs:added", [{}] * 3, timeout_s=60, paths=[str(ROOT)])
    for launched, told, is_same_loss, apart in found:
        assert launched == {"all_gather": 2, "reduce_scatter": 2}
        assert [text.rpartition(": ")[2] for text in told[0].done] == ["2 launches are 1, of what each rank adds before"] * 2
        assert is_same_loss
        assert apart < 1e-6
