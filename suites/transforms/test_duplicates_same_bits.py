"""Merged and added launches, on real ranks and in graphs drawn at random: every bit is what it was, and who shares memory."""

from __future__ import annotations

import random
from pathlib import Path

from torch import fx

from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.program import Program, aten, c10d, copied
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.transforms.add_before_reducing import add_before_reducing
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates
from suites.transforms.drawn_duplicates import drawn_duplicates
from suites.transforms.duplicates import Changed, changed, launches, step_of

ROOT = Path(__file__).resolve().parents[2]


def counts(pools: Pools, made: Program, nodes: list[fx.Node]) -> tuple[int, int]:
    """Launches before and after; fails unless the ranks get the same bits from both."""
    before = made.returns(*nodes)
    after = copied(before)
    merge_duplicates(step_of(after), {})
    assert compare(pools, before, after, made.world, groups=made.groups) == []
    return len(launches(before)), len(launches(after))


def test_every_kind_is_merged_to_the_same_bits(pools: Pools) -> None:
    world = 3
    made = Program(world)
    x = made.given("x", 2 * world, 3)
    flat = made.call(aten.view.default, made.call(aten.detach.default, x), [-1])
    results = [make(value) for value in (x, flat) for make in (made.gather, made.reduce, made.all_reduce)]
    for value in (x, made.call(aten.detach.default, x)):
        sizes = [2] * world
        results.append(made.wait(made.call(c10d.all_to_all_single.default, value, sizes, sizes, "0")))
        results.append(made.wait(made.call(c10d.broadcast.default, value, 1, "0")))
    assert counts(pools, made, results) == (10, 5)


def test_a_captured_step_that_merges_trains_as_eager_does(pools: Pools) -> None:
    found = pools.get(2).run("suites.transforms.duplicate_jobs:steps", [{"steps": 2}] * 2, timeout_s=60, paths=[str(ROOT)])
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


IN_ONE_PROCESS, ON_RANKS = 20, 6


def test_random_graphs_give_the_same_bits_on_all_ranks_of_one_process() -> None:
    merged = left = 0
    for number in range(IN_ONE_PROCESS):
        drawing = drawn_duplicates(number, 2, functional=True)
        found = Changed(drawing.finish(), again=True, seed=number)
        merged += len(found.transformed.done)
        left += len(found.transformed.left)
        again = merge_duplicates(step_of(found.after), {}, again=True).transformed[-1]
        assert again.done == (), (number, again.done)
    assert merged > IN_ONE_PROCESS // 2
    assert left > IN_ONE_PROCESS // 10


def test_random_graphs_of_any_launch_give_the_same_bits_on_three_ranks(pools: Pools) -> None:
    fewer = 0
    for number in range(1000, 1000 + ON_RANKS):
        drawing = drawn_duplicates(number, 3, functional=False)
        before = drawing.finish()
        after = copied(before)
        merge_duplicates(step_of(after), {}, again=True)
        after.graph.lint()
        assert compare(pools, before, after, 3, number, drawing.program.groups) == [], number
        fewer += len(launches(after)) < len(launches(before))
    assert fewer > ON_RANKS // 4


COUNT = 40


def drawn(number: int) -> Changed:
    """A graph of the seed ``number`` for 2 ranks: halves of integers are exact."""
    draw, made = random.Random(number), Program(2)
    inputs, there, returned = made.fulls("abcdef"), list[fx.Node](), list[fx.Node]()
    for _ in range(draw.randint(6, 24)):
        what = draw.choice(("reduce", "reduce", "reduce", "add", "add", "add", "view", "write", "write result", "give"))
        if what == "reduce":
            there.append(made.reduce(draw.choice(inputs), draw.choice(("sum", "sum", "sum", "avg"))))
        elif what == "write":
            made.call(aten._foreach_add_.Scalar, [draw.choice(inputs)], 1)
        elif what == "add" and len(there) > 1:
            one, other = draw.sample(there, 2)
            there = [node for node in there if node not in (one, other) or draw.random() < 0.1]
            there.append(made.add(one, other))
        elif what == "view" and there:
            at = draw.randrange(len(there))
            flat = made.call(aten.view.default, there[at], [-1])
            there[at] = made.call(aten.view.default, flat, [2, 3])
        elif what == "write result" and there and draw.random() < 0.3:
            made.call(aten.add_.Tensor, draw.choice(there), 1)
        elif what == "give" and there:
            returned.append(made.neg(draw.choice(there)))
    return changed(made, *returned, *map(made.neg, there), *map(made.neg, inputs), by=add_before_reducing, seed=number)


def test_random_sums_give_the_same_bits() -> None:
    found = [drawn(number) for number in range(COUNT)]
    assert sum(len(one.transformed.done) for one in found) > COUNT // 4
    assert len({why.split()[-1] for one in found for why in one.whys}) > 4
