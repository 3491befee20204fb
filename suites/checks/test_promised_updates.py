"""What the audit says of the optimizer: where updates stand, what they are made of, and who reads what they write in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.graph.buckets import GraphAnalysis
from suites.checks.launches_by_hand import promise
from suites.graph.handmade import aten, c10d
from suites.graph.whole_steps import Kind, Passed, WholeStep, entries, item, passed

KINDS: tuple[Kind, ...] = ("fused", "foreach", "plain", "in_place")


def told(one: Passed, after: GraphAnalysis | None = None, **change: object) -> list[str]:
    order = {"registration": tuple(value.fqn for value in one.step.held), "entries": tuple(one.step.layers)}
    asked = promise(entries(one.step), **{**order, "updates": "ready", **change})
    return audit(asked, one.before, after or one.after)


@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("by_entry", [False, True], ids=["one-group", "by-entry"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_our_pass_makes_is_green(kind: Kind, by_entry: bool, clips: bool) -> None:
    step = WholeStep(kind=kind, by_entry=by_entry, clips=clips)
    for options in ({}, {"prefetch": 2}, {"prefetch": 0, "defer_reduce": False}):
        for updates in ("last", "ready"):
            one = passed(step, updates=updates, **options)
            assert told(one, updates=updates, **options) == []


@pytest.mark.parametrize("kind", KINDS)
def test_updates_that_come_last_or_first_break_the_other_promise(kind: Kind) -> None:
    step = WholeStep(kind=kind)
    not_right = ', not right behind the wait for its own reduction: updates = "ready" is not reached'
    assert sorted(told(passed(step, updates="last"))) == [
        f"the update of b stands behind the wait for the backward reduce_scatter of a{not_right}",
        f"the update of c stands behind the wait for the backward all_gather of a{not_right}",
    ]
    early = told(passed(step, updates="ready"), updates="last")
    assert 'the update of c stands before the wait for the reduction of a, but updates = "last"' in early


def test_one_update_that_comes_too_late_is_named_with_what_it_stands_behind() -> None:
    one = passed(WholeStep(kind="in_place"))
    update = item(one.graph, aten._fused_adamw_.tensor_lr, 0)
    item(one.graph, c10d.reduce_scatter_tensor.default, -1).append(update)
    assert told(one) == [
        "the update of c stands behind the wait for the backward all_gather of a, not right behind the wait for its own "
        'reduction: updates = "ready" is not reached'
    ]


def test_an_update_that_must_wait_for_a_reader_is_not_late() -> None:
    """``c`` is read once more, by the backward of ``a``."""
    step = WholeStep(kind="in_place")
    again = step.gathered(step.held[-1].shard)
    product = step.call(aten.mul.Tensor, again, 3.0)
    launch = [node for node in step.graph.nodes if node.target is c10d.reduce_scatter_tensor.default][-1]
    for node in (again.all_input_nodes[0], again, product):
        launch.prepend(node)
    step.returns(product, "grad", "")
    one = passed(step, enabled=False, prefetch=0)
    assert "is not reached" not in " ".join(told(one, enabled=False, prefetch=0))


def swap_gradients(graph: fx.Graph) -> None:
    update = item(graph, aten._fused_adamw.tensor_lr, 0)
    first, second = update.args[1]  # type: ignore[misc]
    update.update_arg(1, [second, first])


def swap_states(graph: fx.Graph) -> None:
    update = item(graph, aten._fused_adamw.tensor_lr, 0)
    first, second = update.args[2]  # type: ignore[misc]
    update.update_arg(2, [second, first])


def swap_results(graph: fx.Graph) -> None:
    (values,) = graph.output_node().args
    new = list(values)  # type: ignore[arg-type]
    new[7], new[8] = new[8], new[7]
    graph.output_node().args = (new,)


def of_another_entry(graph: fx.Graph) -> None:
    first, last = (item(graph, aten._fused_adamw.tensor_lr, number) for number in (0, -1))
    last.update_arg(1, first.args[1])


def not_updated(graph: fx.Graph) -> None:
    (values,) = graph.output_node().args
    new = list(values)  # type: ignore[arg-type]
    new[7] = graph.find_nodes(op="placeholder")[0]
    graph.output_node().args = (new,)


BROKEN: dict[str, tuple[Callable[[fx.Graph], None], str]] = {
    "two gradients of a group swapped": (swap_gradients, "reads the gradient of"),
    "two states swapped": (
        swap_states,
        "the update of param {first}.w reads {first}.b.exp_avg, before the pass {first}.w.exp_avg",
    ),
    "two results swapped": (swap_results, "the update of param a.w reads the gradient of a.b, a.b, a.b.exp_avg and 2 more"),
    "an update of another entry's gradients": (of_another_entry, "before the pass the gradient of {last}.w"),
    "a parameter that stays as it is": (not_updated, "param a.w is not updated, and was before the pass"),
}


def ends(clips: bool) -> dict[str, str]:
    """Whose update comes first and last: where all wait for the norm, in the order in which they stood."""
    return {"first": "a", "last": "c"} if clips else {"first": "c", "last": "a"}


@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("way", BROKEN)
def test_a_wrong_pairing_is_named(way: str, clips: bool) -> None:
    breaks, words = BROKEN[way]
    one = passed(WholeStep(kind="fused", clips=clips))
    assert told(one) == []
    breaks(one.graph)
    found, words = told(one), words.format(**ends(clips))
    assert any(words in line for line in found), found


READERS = {
    "fused": aten._fused_adamw.tensor_lr, "foreach": aten._foreach_add.List, "plain": aten.add.Tensor,
    "in_place": aten._fused_adamw_.tensor_lr,
}  # fmt: skip
"""What reads a gradient in its second argument first in each kind of update."""


def swap_first(graph: fx.Graph, kind: Kind) -> None:
    """The two gradients of the update that comes first."""
    reader = item(graph, READERS[kind])
    if kind == "plain":
        other = item(graph, READERS[kind], 2)
        first, second = reader.args[1], other.args[1]
        reader.update_arg(1, second)
        other.update_arg(1, first)
    else:
        first, second = reader.args[1]  # type: ignore[misc]
        reader.update_arg(1, [second, first])


@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_gradients_that_are_swapped_are_named_in_every_form_of_the_update(kind: Kind, clips: bool) -> None:
    """With a norm over all of them too, through which each update needs all."""
    one = passed(WholeStep(kind=kind, clips=clips))
    swap_first(one.graph, kind)
    found = sorted(line for line in told(one) if "update of param" in line)
    first = ends(clips)["first"]
    assert found == [
        f"the update of param {first}.{new} reads the gradient of {first}.{old}, before the pass the gradient of {first}.{new}"
        for new, old in ("bw", "wb")
    ]


def test_a_gradient_that_is_left_out_of_the_norm_to_clip_by_is_named() -> None:
    one = passed(WholeStep(kind="fused", clips=True))
    stack = item(one.graph, aten.stack.default)
    _, *rest = stack.args[0]  # type: ignore[misc]
    stack.update_arg(0, [rest[0], *rest])
    words = "does not read the norm of the gradient of a.w, which it read before the pass"
    assert f"the update of param c.b {words}" in told(one)


def test_a_write_before_the_last_reader_is_found() -> None:
    """The all-gather of the backward is in flight, and its parameter is written."""
    step = WholeStep(kind="in_place")
    gather = [node for node in step.graph.nodes if node.target is c10d.all_gather_into_tensor.default][-1]
    for writer in ("copy_", "view"):
        one = passed(step, enabled=False, prefetch=0)
        graph = one.graph
        launch = next(node for node in graph.nodes if node.name == gather.name)
        shard = launch.all_input_nodes[0]
        assert "is written by" not in " ".join(told(one, enabled=False, prefetch=0))
        with graph.inserting_after(launch):
            target = shard
            if writer == "view":
                target = graph.call_function(aten.view.default, (shard, [4]))
                target.meta["val"] = shard.meta["val"]
        with graph.inserting_after(target if writer == "view" else launch):
            graph.call_function(aten.copy_.default, (target, shard)).meta["val"] = shard.meta["val"]
        found = told(one, enabled=False, prefetch=0)
        assert any(line.startswith("a.w is written by copy_") and "all_gather in backward" in line for line in found), found


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_weight_decay_that_is_hoisted_over_a_gather_of_its_parameters_is_found(prefetch: int) -> None:
    """It needs no gradient, so nothing but the gathers holds it back."""
    one = passed(WholeStep(kind="in_place"), prefetch=prefetch)
    assert told(one, prefetch=prefetch) == []
    decay = item(one.graph, aten._foreach_mul_.Scalar, -1)
    packs = [node for node in one.graph.nodes if node.target is aten.cat.default]
    forward, backward = (pack for pack in packs if set(pack.all_input_nodes) == set(decay.all_input_nodes))
    for pack, directions in ((backward, ["backward"]), (forward, ["forward", "backward"])):
        pack.prepend(decay)
        found = [line for line in told(one, prefetch=prefetch) if "is written by" in line]
        assert found == [
            f"a.{name} is written by {decay.name} before all_gather in {direction} has read it"
            for name in "wb"
            for direction in directions
        ]


def test_a_state_that_is_read_before_it_is_written_is_found() -> None:
    one = passed(WholeStep(kind="in_place"))
    counted = item(one.graph, aten._foreach_add_.Scalar, 0)
    item(one.graph, aten._fused_adamw_.tensor_lr, 0).append(counted)
    found = told(one)
    assert any(line.startswith("c.w.step is read by _fused_adamw_") for line in found), found
