"""Updates that stand where they are ready: behind the wait for their own reduction, and nothing else moves."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.passes.keep_order import forget_order
from suites.graph.handmade import aten
from suites.graph.whole_steps import Kind, Passed, WholeStep, passed, updating

KINDS: tuple[Kind, ...] = ("fused", "foreach", "plain", "in_place")
LAST = ["launch c", "launch b", "wait c", "launch a", "wait b", "wait a", "update a", "update b", "update c"]


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def reduced(one: Passed) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Nodes and other entries' updates behind each entry's reduction."""
    return {b.entry: (b.overlap_nodes, b.updates) for b in one.report.buckets if b.kind == "reduce_scatter"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_update_stands_right_behind_the_deferred_wait_of_its_own_reduction(kind: Kind) -> None:
    step = WholeStep(kind=kind)
    ready = ["launch c", "launch b", "wait c", "update c", "launch a", "wait b", "update b", "wait a", "update a"]
    one = passed(step)
    assert updating(one.graph, step) == ready
    assert {entry: updates for entry, (_, updates) in reduced(one).items()} == {"c": (), "b": ("c",), "a": ("b",)}
    assert not [left for left in one.report.left_alone if "updates" in left.what]
    at_once = ["launch c", "wait c", "update c", "launch b", "wait b", "update b", "launch a", "wait a", "update a"]
    assert updating(passed(step, defer_reduce=False).graph, step) == at_once


@pytest.mark.parametrize("kind", KINDS)
def test_updates_stay_where_they_were_unless_asked(kind: Kind) -> None:
    step = WholeStep(kind=kind)
    one = passed(step, updates="last")
    assert updating(one.graph, step) == LAST
    assert all(updates == () for _, updates in reduced(one).values())


@pytest.mark.parametrize("kind", KINDS)
def test_only_updates_move(kind: Kind) -> None:
    step = WholeStep(kind=kind)
    last, ready = passed(step, updates="last"), passed(step)
    own = {last.graph_names[where] for where in last.after.updating}
    assert [name for name in names(last.graph) if name not in own] == [n for n in names(ready.graph) if n not in own]
    assert own


def test_an_update_that_is_ready_where_it_stands_stays_there() -> None:
    """Something else that reads the last gradient stands before it."""
    step = WholeStep(kind="plain")
    gradient = step.held[0].gradient
    assert gradient is not None
    other = step.call(aten.neg.default, gradient)
    gradient.append(other)
    step.returns(other, "value")
    one, last = passed(step), passed(step, updates="last")
    for graph in (one.graph, last.graph):
        order = names(graph)
        assert all(
            order.index(other.name) < order.index(user.name)
            for user in gradient_of(graph, other.name).users
            if user.name not in (other.name, "output")
        )


def gradient_of(graph: fx.Graph, name: str) -> fx.Node:
    """What the node ``name`` reads."""
    return next(node for node in graph.nodes if node.name == name).all_input_nodes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_with_clipping_nothing_moves_and_the_report_says_why(kind: Kind) -> None:
    step = WholeStep(kind=kind, clips=True)
    one = passed(step)
    assert names(one.graph) == names(passed(step, updates="last").graph)
    (left,) = (left for left in one.report.left_alone if left.what == "updates of a, b, c")
    assert left.reason.endswith("of which _foreach_norm_scalar makes one value, as clipping by a global norm does")


@pytest.mark.parametrize("kind", ["fused", "foreach", "in_place"])
def test_one_group_of_several_entries_does_not_move_and_the_report_says_what_to_do(kind: Kind) -> None:
    step = WholeStep(kind=kind, by_entry=False)
    one = passed(step)
    assert names(one.graph) == names(passed(step, updates="last").graph)
    (left,) = (left for left in one.report.left_alone if left.what == "updates of a, b, c")
    assert left.reason.startswith("one parameter group has parameters of several entries")
    assert left.reason.endswith('[optimizer] groups = "entry" gives each entry its own')


def test_a_plain_loop_over_one_group_is_an_update_for_each_entry() -> None:
    step = WholeStep(kind="plain", by_entry=False)
    assert updating(passed(step).graph, step)[3] == "update c"


def test_what_several_updates_need_comes_with_the_first_of_them() -> None:
    """One negated learning rate for all."""
    step = WholeStep(kind="plain")
    rates = [node for node in step.graph.nodes if node.target is aten.neg.default and node.all_input_nodes == [step.lr]]
    for other in rates[1:]:
        other.replace_all_uses_with(rates[0])
        step.graph.erase_node(other)
    one = passed(step)
    assert updating(one.graph, step)[3:] == ["update c", "launch a", "wait b", "update b", "wait a", "update a"]
    one.graph.lint()


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_the_order_of_updates_is_kept_through_later_compilers(kind: Kind) -> None:
    """The wait for the next reduction reads what it waits for behind the update."""
    step = WholeStep(kind=kind)
    kept, bare = passed(step, insert_overlap_deps=True), passed(step)
    own = {bare.graph_names[where] for where in bare.after.updating}
    pairs = [
        (done.name, reader.name)
        for node in kept.graph.find_nodes(op="call_function", target=after)
        for done in node.args[1]
        for item_ in node.users
        for reader in item_.users
        if done.name in own and is_wait(reader)
    ]
    assert reduced(kept) == reduced(bare)
    assert len(pairs) == 2, "of b behind the update of c, of a behind that of b"
    forget_order(kept.graph)
    assert names(kept.graph) == names(bare.graph)


def test_a_graph_without_update_says_so() -> None:
    step = WholeStep(kind="plain")
    step.outputs, step.returned = step.outputs[:7], step.returned[:7]
    one = passed(step)
    assert [left.reason for left in one.report.left_alone] == [
        'updates = "ready", but no update of a parameter was found in the graph'
    ]


def test_by_size_an_update_follows_the_last_bucket_that_it_needs() -> None:
    step = WholeStep(kind="foreach")
    one = passed(step, by="size", cap_mb=(1e-9,))
    waited = updating(one.graph, step)
    assert waited.index("update c") < waited.index("wait a")


def test_an_update_hides_the_reduction_that_it_stands_behind() -> None:
    step = WholeStep(kind="foreach")
    assert reduced(passed(step))["b"][0] > reduced(passed(step, updates="last"))["b"][0]


def test_an_update_passes_the_launch_that_a_deferred_wait_takes_along() -> None:
    """The sum over replicas of c's gradient stands at the place of the wait that it was put off with; c's update needs none."""
    step = WholeStep(kind="plain")
    gradient = next(one.gradient for one in step.held if one.fqn == "c.w")
    assert gradient is not None
    with step.graph.inserting_before(gradient.next):
        summed = step.summed(gradient)
    step.returned[step.returned.index(gradient)] = summed
    order = names(passed(step).graph)
    update = next(n.name for n, v in zip(step.returned, step.outputs, strict=True) if v.key == ("param", "c.w"))
    launch = summed.all_input_nodes[0].name
    assert order.index("reduce_scatter_tensor_1") < order.index(update) < order.index(launch)
