"""Buffers that launches fill, and optimizers that write what the next step gathers; on real ranks, bit for bit."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.ranks.pools import Pools
from suites.passes.programs import COLUMNS, SGD, Program, aten, equal, through

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])


@WORLDS
def test_a_buffer_that_is_read_elsewhere_keeps_its_launch(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q, r, s = made.shards("pqrs")
    buffer = made.buffer_for(p)
    found = [
        made.gather_into(p, buffer),
        made.neg(buffer),
        *(made.gather(node) for node in (q, r)),
        made.gather_into(s, made.buffer_for(s)),
    ]
    passed = equal(pools, made, found)
    assert passed.launches().count("all_gather_into_tensor_out") == 1
    assert len(passed.launches()) == 2
    assert passed.reasons == ["its buffer empty_memory_format is read elsewhere, by neg_default"]


@WORLDS
def test_one_buffer_for_two_gathers_keeps_both_apart(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q = made.shards("pq")
    buffer = made.buffer_for(p)
    first = made.neg(made.gather_into(p, buffer))
    passed = equal(pools, made, [first, made.neg(made.gather_into(q, buffer))])
    assert passed.launches() == ["all_gather_into_tensor_out"] * 2
    assert all("read elsewhere" in reason for reason in passed.reasons)


@WORLDS
def test_a_buffer_that_is_an_input_is_filled(pools: Pools, world: int) -> None:
    made = Program(world)
    p, q, buffer = *made.shards("pq"), made.given("buffer", 2 * world, COLUMNS)
    passed = equal(pools, made, [made.gather_into(p, buffer), made.gather(q)])
    assert passed.reasons == ["its buffer buffer is no new one"]


@WORLDS
def test_a_launch_whose_input_changes_before_its_wait_is_left_alone(pools: Pools, world: int) -> None:
    """What arrives is anybody's guess, so no rank runs it: the program's own fault, which the pass must not spread."""
    made = Program(world)
    p, q, r = made.shards("pqr")
    launch = made.launch_gather(p)
    made.call(aten.add_.Tensor, p, 1.0)
    passed = through(made, made.returns(made.wait(launch), made.gather(q), made.gather(r)))
    assert len(passed.launches()) == 2
    assert passed.reasons == ["add__tensor writes what it sends before its wait"]


@WORLDS
@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
@pytest.mark.parametrize("optimizer", ["list", "fused", "each"])
def test_an_optimizer_between_steps_writes_before_the_next_gather(pools: Pools, world: int, kind: str, optimizer: str) -> None:
    """Two steps in one graph: gather, reduce, update in place, gather again; each of the four merges into one."""
    made = Program(world)
    shards, x = made.shards("pq"), made.given("x", 2 * world, COLUMNS)
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
        update(made, optimizer, shards, gradients)
    passed = equal(pools, made, [x])
    assert len(passed.launches()) == 4


def update(made: Program, optimizer: str, shards: list[fx.Node], gradients: list[fx.Node]) -> None:
    if optimizer == "list":
        made.call(aten._foreach_sub_.List, shards, gradients, alpha=2)
    elif optimizer == "fused":
        made.call(aten._fused_sgd_.default, shards, gradients, [], **SGD)
    else:
        for shard, gradient in zip(shards, gradients, strict=True):
            made.call(aten.sub_.Tensor, shard, gradient)
