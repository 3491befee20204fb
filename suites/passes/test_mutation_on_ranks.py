"""Writes in place around launches: reads and writes of one storage keep their order, whatever it is reached through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import COLUMNS, SGD, Program, aten, c10d, equal

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])
Write = Callable[[Program, fx.Node], object]


def directly(made: Program, node: fx.Node) -> object:
    return made.call(aten.add_.Tensor, node, 1.0)


def by_a_view(made: Program, node: fx.Node) -> object:
    return made.call(aten.add_.Tensor, made.call(aten.view.default, node, [-1]), 1.0)


def by_a_part(made: Program, node: fx.Node) -> object:
    return made.call(aten.zero_.default, made.part(made.call(aten.split.Tensor, node, 1), 0))


def by_an_out(made: Program, node: fx.Node) -> object:
    return made.call(aten.add.out, node, node, out=node)


def by_a_list(made: Program, node: fx.Node) -> object:
    return made.call(aten._foreach_mul_.Scalar, [node], 2.0)


def by_a_copy(made: Program, node: fx.Node) -> object:
    return made.call(
        aten.copy_.default, made.call(aten.t.default, node), made.call(aten.neg.default, made.call(aten.t.default, node))
    )


def by_an_optimizer(made: Program, node: fx.Node) -> object:
    gradient = made.call(aten.ones_like.default, node)
    return made.call(aten._fused_sgd_.default, [node], [gradient], [], **SGD)


def by_a_collective(made: Program, node: fx.Node) -> object:
    return made.all_reduce_in_place(node)


WRITES = pytest.mark.parametrize(
    "write", [directly, by_a_view, by_a_part, by_an_out, by_a_list, by_a_copy, by_an_optimizer, by_a_collective]
)


@WORLDS
@WRITES
def test_a_parameter_written_between_two_gathers_of_it_is_gathered_twice(pools: Pools, world: int, write: Write) -> None:
    made = Program(world)
    p, q = made.shards("pq")
    first, other = made.gather(p), made.gather(q)
    write(made, p)
    passed = equal(pools, made, [first, other, made.gather(p)])
    assert len(passed.launches("all_gather")) == 2


@WORLDS
@WRITES
def test_a_parameter_written_before_its_gather_is_sent_as_it_is_then(pools: Pools, world: int, write: Write) -> None:
    """The first gather waits for the write; that costs no launch."""
    made = Program(world)
    p, q = made.shards("pq")
    first = made.neg(made.gather(p))
    write(made, q)
    passed = equal(pools, made, [first, made.gather(q)])
    assert len(passed.launches("all_gather")) == 1


@WORLDS
@WRITES
def test_a_parameter_written_after_its_gather_is_sent_as_it_was(pools: Pools, world: int, write: Write) -> None:
    made = Program(world)
    p, q = made.shards("pq")
    first = made.gather(p)
    write(made, p)
    passed = equal(pools, made, [first, made.neg(made.gather(q))])
    assert len(passed.launches("all_gather")) == 1


@WORLDS
@WRITES
@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
def test_a_gradient_buffer_used_again_after_its_reduction_is_reduced_twice(
    pools: Pools, world: int, kind: str, write: Write
) -> None:
    made = Program(world)
    x, y = made.fulls("xy")
    reduction = getattr(made, kind)
    first, other = reduction(x), reduction(y)
    write(made, x)
    passed = equal(pools, made, [first, other, reduction(x)])
    assert len([name for name in passed.launches() if not name.endswith("_")]) == 2


@WORLDS
@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
def test_a_gradient_written_before_the_last_reduction_of_its_bucket_is_sent_as_it_was(
    pools: Pools, world: int, kind: str
) -> None:
    """The bucket stands where the last one stood, and the first one's gradient is overwritten before: the write goes behind."""
    made = Program(world)
    x, y = made.fulls("xy")
    reduction = getattr(made, kind)
    first = reduction(x)
    made.call(aten.zero_.default, x)
    passed = equal(pools, made, [first, reduction(y), made.neg(x)])
    assert len(passed.launches()) == 1


@WORLDS
@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
def test_a_gradient_made_of_an_overwritten_one_parts_the_bucket(pools: Pools, world: int, kind: str) -> None:
    """One buffer holds one gradient after the other, as accumulating ones do."""
    made = Program(world)
    buffer, x, y = made.fulls("bxy")
    reduction = getattr(made, kind)
    found = []
    for gradient in (x, y):
        made.call(aten.copy_.default, buffer, gradient)
        found.append(reduction(buffer))
    assert len(equal(pools, made, found).launches()) == 2


@WORLDS
@WRITES
def test_what_arrived_is_written_without_harm_to_what_arrived_beside_it(pools: Pools, world: int, write: Write) -> None:
    made = Program(world)
    nodes = *made.shards("pq"), *made.fulls("xyuv")
    launched = [f(node) for f, node in zip([made.gather] * 2 + [made.reduce] * 2 + [made.all_reduce] * 2, nodes, strict=True)]
    for first in launched[::2]:
        write(made, first)
    passed = equal(pools, made, launched)
    assert sorted(passed.launches())[:1] == ["all_gather_into_tensor"]


@WORLDS
def test_a_result_read_before_and_after_it_is_written_is_read_so(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q = made.shards("pq")
    first = made.gather(p)
    before = made.neg(first)
    made.call(aten.zero_.default, first)
    after = made.neg(first)
    assert len(equal(pools, made, [before, after, made.gather(q)]).launches()) == 1


@WORLDS
def test_a_wait_is_not_deferred_past_a_write_to_what_its_readers_read(pools: Pools, world: int) -> None:
    made = Program(world)
    x, total = *made.fulls("x"), *made.shards("t")
    seen = made.add(made.reduce(x), total)
    made.call(aten.zero_.default, total)
    made.module = "b"
    assert len(equal(pools, made, [seen, made.reduce(made.neg(x))], ["a", "b"]).launches()) == 2


@WORLDS
def test_random_numbers_are_drawn_in_their_order(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q = made.shards("pq")
    first = made.gather(made.call(aten.add.Tensor, p, made.call(aten.randint_like.default, p, 5)))
    noise = made.call(aten.randint_like.default, first, 5)
    equal(
        pools,
        made,
        [first, noise, made.gather(q), made.reduce(made.call(aten.randint_like.default, first, 5)), made.reduce(noise)],
    )


@WORLDS
def test_a_written_alias_that_only_storages_tell_of_parts_the_bucket(pools: Pools, world: int) -> None:
    """Two inputs of the graph share a storage: no operator says so."""
    made = Program(world)
    whole = made.given("whole", 4, COLUMNS)
    with made.mode:
        half = made.shown("half", whole.meta["val"][2:])
    q = made.given("q", 2, COLUMNS)
    first, other = made.gather(half), made.gather(q)
    made.call(aten.mul_.Tensor, whole, 3.0)
    assert len(equal(pools, made, [first, other, made.gather(half)]).launches()) == 2


@WORLDS
def test_an_unsafe_view_is_a_view(pools: Pools, world: int) -> None:
    """Its schema says nothing of sharing its input's storage."""
    made = Program(world)
    p, q = made.shards("pq")
    first = made.gather(p)
    made.call(aten.mul_.Tensor, made.call(aten._unsafe_view.default, p, [COLUMNS, 2]), 3.0)
    assert len(equal(pools, made, [first, made.gather(q), made.gather(p)]).launches()) == 2


@WORLDS
def test_a_write_while_another_launch_is_in_flight_stays_out_of_its_way(pools: Pools, world: int) -> None:
    """Launches stay open over the writes of others; each is written only before its launch or behind its wait."""
    made = Program(world)
    p, q, r = made.shards("pqr")
    first = made.launch_gather(p)
    made.call(aten.add_.Tensor, q, 1.0)
    second = made.launch_gather(q)
    one = made.wait(first)
    made.call(aten.add_.Tensor, p, 1.0)
    made.call(aten.copy_.default, r, p)
    third = made.call(c10d.all_gather_into_tensor.default, r, world, "0")
    two, three = made.wait(second), made.wait(third)
    made.call(torch.ops.aten.zero_.default, r)
    assert len(equal(pools, made, [one, two, three]).launches()) == 2
