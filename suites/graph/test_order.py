"""What must stay before what, in graphs written by hand: writes through every kind of alias, and collectives in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from suites.graph.handmade import GROUP, RANKS, Handmade, aten, c10d
from suites.graph.ordering import FAKE, added, directly, ordered, stays_before
from suites.passes.programs import SGD


def through_views(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.zero_.default, made.call(aten.t.default, made.call(aten.view.default, node, [4, 1])))


def through_a_part(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.zero_.default, made.part(made.call(aten.split.Tensor, node, 1), 0))


def through_an_unsafe_view(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.zero_.default, made.call(aten._unsafe_view.default, node, [4]))


def through_an_out_argument(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.neg.out, made.param("other", 2, 2), out=node)


def through_what_a_write_returned(made: Handmade, node: fx.Node) -> fx.Node:
    made.call(aten.relu_.default, node)
    return made.call(aten.zero_.default, made.call(aten.relu_.default, node))


def by_a_list(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten._foreach_mul_.Scalar, [made.param("other", 2, 2), node], 2.0)


def by_a_fused_optimizer(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten._fused_sgd_.default, [node], [made.call(aten.ones_like.default, node)], [], **SGD)


def by_a_collective(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(c10d.all_reduce_.default, node, "sum", GROUP)


def by_a_coalesced_collective(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(c10d.all_reduce_coalesced_.default, [made.param("other", 2, 2), node], "sum", GROUP)


def by_a_batch_norm(made: Handmade, node: fx.Node) -> fx.Node:
    mean, x = made.call(aten.view.default, node, [4]), made.batch(3, 4)
    return made.call(aten.native_batch_norm.default, x, None, None, mean, made.param("var", 4), True, 0.1, 1e-5)


WRITES: list[Callable[[Handmade, fx.Node], fx.Node]] = [
    *(directly, through_views, through_a_part, through_an_unsafe_view, through_an_out_argument, through_what_a_write_returned),
    *(by_a_list, by_a_fused_optimizer, by_a_collective, by_a_coalesced_collective, by_a_batch_norm),
]


@FAKE
@pytest.mark.parametrize("write", WRITES)
def test_an_input_written_between_two_launches_stays_between_them(write: Callable[..., fx.Node], fake: bool) -> None:
    made = Handmade()
    p, q = made.param("p", 2, 2), made.param("q", 2, 2)
    first, other = made.gathered(p), made.gathered(q)
    writer = write(made, p)
    last = made.gather(p)
    for node in (first, other, made.wait(last)):
        made.returns(node)
    order = ordered(made, fake)
    assert stays_before(order, first, writer)
    assert stays_before(order, writer, last)
    assert not stays_before(order, other, writer)
    assert [order.index[writer] in order.writers(storage) for storage in order.storages(p)] == [True]
    assert order.index[last] in order.readers(*order.storages(p))


@FAKE
@pytest.mark.parametrize("waited", [True, False], ids=["after its wait", "before its wait"])
def test_a_gradient_buffer_is_used_again_only_when_it_was_sent(waited: bool, fake: bool) -> None:
    made = Handmade()
    buffer = made.call(aten.clone.default, made.param("x", 2, 2))
    launch = made.reduce(buffer)
    if waited:
        wait = made.wait(launch)
    writer = made.call(aten.zero_.default, buffer)
    if not waited:
        wait = made.wait(launch)
    made.returns(wait)
    order = ordered(made, fake)
    assert stays_before(order, launch, writer)
    assert stays_before(order, wait, writer) is waited
    assert stays_before(order, launch, wait)


@FAKE
def test_a_coalesced_launch_reads_each_input_until_every_wait_before_the_write(fake: bool) -> None:
    made = Handmade()
    inputs = [made.param(name, 2, 2) for name in "pq"]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, inputs, RANKS, GROUP)
    waits = [made.wait(made.part(launch, i)) for i in range(2)]
    writer = made.call(aten.zero_.default, inputs[1])
    for wait in waits:
        made.returns(wait)
    order = ordered(made, fake)
    assert all(stays_before(order, wait, writer) for wait in waits)
    assert not stays_before(order, waits[0], waits[1])


@FAKE
def test_a_buffer_of_an_out_form_read_elsewhere_is_read_when_it_is_full(fake: bool) -> None:
    made = Handmade()
    shard = made.param("p", 2, 2)
    buffer = made.call(aten.empty.memory_format, [4, 2], dtype=torch.float32, device="cpu")
    early = made.call(aten.neg.default, buffer)
    launch = made.call(c10d.all_gather_into_tensor_out.default, shard, RANKS, GROUP, out=buffer)
    wait = made.wait(launch)
    late = made.call(aten.neg.default, buffer)
    for node in (early, wait, late):
        made.returns(node)
    order = ordered(made, fake)
    assert stays_before(order, early, launch)
    assert stays_before(order, wait, late)
    assert order.storages(wait) == order.storages(buffer)
    assert order.writers(*order.storages(wait)) == (order.index[launch],)


@FAKE
def test_two_waits_of_one_launch_are_free_of_each_other(fake: bool) -> None:
    made = Handmade()
    launch = made.gather(made.param("p", 2, 2))
    one, two = made.wait(launch), made.wait(launch)
    made.returns(made.call(aten.neg.default, one))
    made.returns(made.call(aten.neg.default, two))
    order = ordered(made, fake)
    assert added(order) == []
    assert order.storages(one) == order.storages(two) == order.storages(launch)


def test_a_batch_norm_that_does_not_train_writes_nothing() -> None:
    made = Handmade()
    mean, var, x = made.param("m", 4), made.param("v", 4), made.batch(3, 4)
    norm = made.call(aten.native_batch_norm.default, x, None, None, mean, var, False, 0.1, 1e-5)
    made.returns(made.part(norm, 0))
    order = ordered(made)
    assert added(order) == []
    assert order.writers(*order.storages(mean)) == ()


def test_parts_of_a_coalesced_result_are_storages_of_their_own_and_taking_one_reads_nothing() -> None:
    made = Handmade()
    launch = made.call(c10d.all_reduce_coalesced.default, [made.param(name, 2, 2) for name in "pq"], "sum", GROUP)
    first, second = made.part(launch, 0), made.part(launch, 1)
    writer = directly(made, made.wait(first))
    late = made.part(launch, 1)
    made.returns(made.wait(second))
    made.returns(made.wait(late))
    order = ordered(made)
    assert order.storages(first) | order.storages(second) == order.storages(launch)
    assert order.storages(first).isdisjoint(order.storages(second))
    assert not stays_before(order, writer, late)


def test_a_buffer_reduced_again_and_again_costs_the_same_each_time() -> None:
    made = Handmade()
    shards, buffer = [made.param(f"p{i}", 2, 2) for i in range(60)], made.param("buffer", 4, 2)
    for shard in shards:
        made.wait(made.call(c10d.all_gather_into_tensor_out.default, shard, RANKS, GROUP, out=buffer))
        directly(made, shard)
    made.returns(buffer)
    order = ordered(made)
    assert sum(map(len, order.before[:-1])) < 5 * len(order.nodes)


@FAKE
def test_a_late_wait_keeps_its_place_though_its_buffer_was_launched_into_again(fake: bool) -> None:
    made = Handmade()
    p, q, buffer = made.param("p", 2, 2), made.param("q", 2, 2), made.param("buffer", 4, 2)
    gather = c10d.all_gather_into_tensor_out.default
    early, other = (made.call(gather, node, RANKS, GROUP, out=buffer) for node in (p, q))
    made.call(c10d.all_reduce_.default, made.wait(other), "sum", GROUP)
    writer = directly(made, p)
    wait = made.wait(early)
    made.returns(wait)
    assert stays_before(ordered(made, fake), writer, wait)
