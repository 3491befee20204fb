"""Writes in place around launches: reads and writes of one storage keep their order, whatever it is reached through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten
from suites.passes.programs import SGD, Passed

Equal = Callable[..., Passed]
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


WRITES = [directly, by_a_view, by_a_part, by_an_out, by_a_list, by_a_copy, by_an_optimizer, by_a_collective]


@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_written_between_two_gathers_of_it_is_gathered_twice(made: Program, equal: Equal, write: Write) -> None:
    p, q = made.shards("pq")
    first, other = made.gather(p), made.gather(q)
    write(made, p)
    passed = equal([first, other, made.gather(p)])
    assert [name for name in passed.launches if name != "all_reduce_"] == ["all_gather_into_tensor"] * 2


@pytest.mark.parametrize("write", WRITES)
def test_what_arrived_is_written_without_harm_to_what_arrived_beside_it(made: Program, equal: Equal, write: Write) -> None:
    nodes = *made.shards("pq"), *made.fulls("xyuv")
    forms = [made.gather] * 2 + [made.reduce] * 2 + [made.all_reduce] * 2
    launched = [form(node) for form, node in zip(forms, nodes, strict=True)]
    for first in launched[::2]:
        write(made, first)
    passed = equal(launched)
    assert len([name for name in passed.launches if name != "all_reduce_"]) == 3


def sent_before_it_is_written(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    first = made.gather(p)
    directly(made, p)
    return [first, made.neg(made.gather(q))]


def read_before_and_after_it_is_written(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    first = made.gather(p)
    before = made.neg(first)
    made.call(aten.zero_.default, first)
    return [before, made.neg(first), made.gather(q)]


def gradients_added_in_one_buffer(made: Program) -> list[fx.Node]:
    """One buffer holds one gradient after the other, as accumulating ones do."""
    buffer, x, y = made.fulls("bxy")
    found = []
    for gradient in (x, y):
        made.call(aten.copy_.default, buffer, gradient)
        found.append(made.reduce(buffer))
    return found


def one_buffer_for_two_gathers(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    buffer = made.buffer_for(p)
    return [made.neg(made.gather_into(shard, buffer)) for shard in (p, q)]


def written_through_what_only_storages_tell_of(made: Program) -> list[fx.Node]:
    """Two inputs of the graph share a storage: no operator says so."""
    whole = made.given("whole", 4, COLUMNS)
    with made.mode:
        half = made.shown("half", whole.meta["val"][2:])
    q = made.given("q", 2, COLUMNS)
    first, other = made.gather(half), made.gather(q)
    made.call(aten.mul_.Tensor, whole, 3.0)
    return [first, other, made.gather(half)]


def written_through_an_unsafe_view(made: Program) -> list[fx.Node]:
    """Its schema says nothing of sharing its input's storage."""
    p, q = made.shards("pq")
    first = made.gather(p)
    made.call(aten.mul_.Tensor, made.call(aten._unsafe_view.default, p, [COLUMNS, 2]), 3.0)
    return [first, made.gather(q), made.gather(p)]


def written_while_another_launch_is_in_flight(made: Program) -> list[fx.Node]:
    """Launches stay open over the writes of others; each is written only before its launch or behind its wait."""
    p, q, r = made.shards("pqr")
    first = made.launch_gather(p)
    directly(made, q)
    second = made.launch_gather(q)
    one = made.wait(first)
    directly(made, p)
    made.call(aten.copy_.default, r, p)
    third = made.launch_gather(r)
    two, three = made.wait(second), made.wait(third)
    made.call(aten.zero_.default, r)
    return [one, two, three]


def random_numbers_drawn_in_their_order(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    first = made.gather(made.add(p, draw(made, p)))
    noise = draw(made, first)
    return [first, noise, made.gather(q), made.reduce(draw(made, first)), made.reduce(noise)]


def draw(made: Program, like: fx.Node) -> fx.Node:
    return made.call(aten.randint_like.default, like, 5)


@pytest.mark.parametrize(
    ("build", "launches"),
    [
        (sent_before_it_is_written, 1),
        (read_before_and_after_it_is_written, 1),
        (gradients_added_in_one_buffer, 2),
        (one_buffer_for_two_gathers, 2),
        (written_through_what_only_storages_tell_of, 2),
        (written_through_an_unsafe_view, 2),
        (written_while_another_launch_is_in_flight, 2),
        (random_numbers_drawn_in_their_order, 3),
    ],
)
def test_reads_and_writes_keep_their_order(
    made: Program, equal: Equal, build: Callable[[Program], list[fx.Node]], launches: int
) -> None:
    assert len(equal(build(made)).launches) == launches


@pytest.mark.parametrize("kind", ["reduce", "all_reduce"])
def test_a_gradient_buffer_is_used_again_only_when_it_was_sent(made: Program, equal: Equal, kind: str) -> None:
    """The bucket stands where its last member stood. If its first member was overwritten before, that write goes behind it."""
    x, y = made.fulls("xy")
    reduction = getattr(made, kind)
    first = reduction(x)
    made.call(aten.zero_.default, x)
    assert len(equal([first, reduction(y), made.neg(x), reduction(x)]).launches) == 2


def test_a_wait_is_not_deferred_past_a_write_to_what_its_readers_read(made: Program, equal: Equal) -> None:
    x, total = *made.fulls("x"), *made.shards("t")
    seen = made.add(made.reduce(x), total)
    made.call(aten.zero_.default, total)
    made.module = "b"
    assert len(equal([seen, made.reduce(made.neg(x))], ["a", "b"]).launches) == 2
