"""Overlap that is found by itself: what it hides, in which order, and within which limits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from torch import fx

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.cost.cluster import Cluster
from pytest_fxbucket.cost.costs import checked
from pytest_fxbucket.errors import PlanError, SimulationError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.auto.reorder import reorder_by_itself
from pytest_fxbucket.passes.auto.schedule import Scheduled, scheduled
from pytest_fxbucket.passes.report import Schedule
from pytest_fxbucket.plan.schema_bucket import Overlap
from suites.benchmarks.simulator import CLUSTER, generated
from suites.graph.handmade import Handmade, aten

PLAIN: Cluster = replace(CLUSTER, launch=0.0, rounding=1)
SECONDS = {"aten::mm": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 0.5}
ANY = Overlap()


def estimates(seconds: Mapping[str, float] = SECONDS) -> Estimates:
    """By kind of collective, or operator; all else takes none."""
    return Estimates(lambda node: seconds.get(launch_kind(node) or operator_name(node), 0.0), PLAIN)


def a_layer_each(layers: int = 3, *, backward: bool = True) -> fx.Graph:
    """Weights that are gathered right before a product, forward and backward, and reduced right behind another."""
    made = Handmade(2)
    weights = [made.param(f"layers.{n}.weight", 8, 16) for n in range(layers)]
    x = kept = made.batch(16, 16)
    for weight in weights:
        x = made.call(aten.mm.default, x, made.gathered(weight))
    made.returns(made.call(aten.sum.default, x), "loss")
    for number, weight in reversed(list(enumerate(weights if backward else []))):
        made.returns(made.reduced(made.call(aten.mm.default, kept, x)), "grad", f"layers.{number}.weight")
        x = made.call(aten.mm.default, x, made.gathered(weight))
    return made.finish()


def found(graph: fx.Graph, limits: Overlap = ANY, seconds: Mapping[str, float] = SECONDS) -> Scheduled:
    return scheduled(graph, estimates(seconds), limits)


def came_to(graph: fx.Graph, limits: Overlap = ANY, seconds: Mapping[str, float] = SECONDS) -> Schedule:
    return found(graph, limits, seconds).came_to


def events(order: Sequence[fx.Node]) -> str:
    """``g`` a gather, ``r`` a reduction, ``w`` a wait, ``m`` a product, in order."""
    letters = {"all_gather": "g", "reduce_scatter": "r", "all_reduce": "a"}
    shown = []
    for node in order:
        kind = launch_kind(node)
        shown.append(letters[kind] if kind else "w" if collectives.is_wait(node) else "m" if "mm" in node.name else "")
    return "".join(shown)


def moved(graph: fx.Graph, limits: Overlap = ANY, seconds: Mapping[str, float] = SECONDS) -> str:
    return events(found(graph, limits, seconds).order or list(graph.nodes))


def test_each_gather_is_launched_when_it_must_be_and_no_earlier() -> None:
    graph = a_layer_each(backward=False)
    assert events(graph.nodes) == "gwmgwmgwm"
    one = found(graph)
    assert events(one.order or ()) == "ggwmgwmwm"
    took = one.came_to
    assert (took.exposed_before, took.exposed, took.hidden, took.collectives) == (1.5, 0.5, 2, 3)


def test_a_gather_that_takes_longer_is_launched_further_ahead() -> None:
    graph = a_layer_each(4, backward=False)
    assert moved(graph) == "ggwmgwmgwmwm"
    assert moved(graph, seconds={**SECONDS, "all_gather": 1.5}) == "gggwmgwmwmwm"


def test_reductions_are_launched_at_once_and_waited_for_when_they_have_ended() -> None:
    graph = a_layer_each()
    assert events(graph.nodes) == "gwmgwmgwm" + "mrwgwm" * 3
    one = found(graph)
    assert one.came_to.exposed == 0.5
    assert one.came_to.hidden == one.came_to.collectives - 1
    behind = events(one.order or ()).split("r", 1)[1]
    assert "w" in behind[: behind.index("mm") + 2], "it is not held to the end"


def test_a_reduction_does_not_hold_up_a_gather_on_its_stream() -> None:
    slow = {**SECONDS, "reduce_scatter": 0.9, "all_gather": 0.9}
    assert came_to(a_layer_each(8), seconds=slow).exposed <= 0.9 + 0.9 + 1e-9


def test_products_keep_their_order() -> None:
    graph = generated(900).graphs["joint"].graph
    order = scheduled(graph, Estimates(lambda node: 1e-6, CLUSTER), Overlap()).order
    assert order is not None
    assert [node for node in order if multiplies(node)] == [node for node in graph.nodes if multiplies(node)]


def test_light_compute_is_put_off_with_the_wait_that_it_reads() -> None:
    made = Handmade(2)
    x = made.batch(16, 16)
    c10d = c10d_functional()
    summed = made.call(
        c10d.wait_tensor.default, made.call(c10d.all_reduce.default, made.call(aten.mm.default, x, x), "sum", "0")
    )
    added = made.call(aten.add.Tensor, summed, x)
    other = made.call(aten.mm.default, x, x)
    made.returns(made.call(aten.sum.default, made.call(aten.mm.default, other, added)), "loss")
    graph = made.finish()
    assert events(graph.nodes) == "mawmm"
    one = found(graph)
    assert events(one.order or ()) == "mamwm"
    assert (one.came_to.exposed_before, one.came_to.exposed) == (0.5, 0.0)
    names = [node.name for node in one.order or ()]
    assert names.index(added.name) > names.index(other.name)


def test_collectives_that_need_each_other_are_waited_for_in_turn() -> None:
    made = Handmade(2)
    weight = made.param("weight", 8, 16)
    x = made.batch(16, 16)
    gradient = made.call(aten.mm.default, x, made.gathered(weight))
    c10d = c10d_functional()
    reduced = made.call(c10d.wait_tensor.default, made.call(c10d.all_reduce.default, made.reduced(gradient), "avg", "0"))
    for _ in range(3):
        x = made.call(aten.mm.default, x, x)
    made.returns(made.call(aten.sum.default, x), "loss")
    made.returns(reduced, "grad", "weight")
    graph = made.finish()
    assert events(graph.nodes) == "gwmrwawmmm"
    assert moved(graph) == "gwmrmwamwm"
    assert came_to(graph).exposed == 0.5


def test_a_graph_that_is_best_as_it_is_stays() -> None:
    graph = a_layer_each()
    first = found(graph)
    assert first.order is not None
    again = copy.deepcopy(graph)
    report = reorder_by_itself(again, Overlap(schedule="auto"), estimates(), None)
    assert report.schedule is not None
    assert found(again).order is None
    before = [node.name for node in again.nodes]
    assert reorder_by_itself(again, Overlap(schedule="auto"), estimates(), None).schedule is None
    assert [node.name for node in again.nodes] == before


def test_a_second_run_keeps_the_same_order_for_later_compilers() -> None:
    graph, rules = a_layer_each(), Overlap(schedule="auto", insert_overlap_deps=True)
    first = reorder_by_itself(graph, rules, estimates(), None).kept
    assert first
    assert reorder_by_itself(graph, rules, estimates(), None).kept == first


@pytest.mark.parametrize("gathers", [1, 2])
def test_no_more_gathers_are_in_flight_than_allowed(gathers: int) -> None:
    order = found(a_layer_each(6), Overlap(max_prefetch=gathers), {**SECONDS, "all_gather": 2.0}).order
    flying, most = set[fx.Node](), 0
    for node in order or ():
        if launch_kind(node) == "all_gather":
            flying.add(node)
        flying -= set(node.all_input_nodes) if collectives.is_wait(node) else set()
        most = max(most, len(flying))
    assert most == gathers


def test_no_more_bytes_are_in_flight_than_allowed() -> None:
    graph = a_layer_each(4)
    size = 16 * 16 * 4 / (1 << 30)
    free, bound = came_to(graph), came_to(graph, Overlap(max_in_flight_gb=size))
    assert free.exposed < bound.exposed <= free.exposed_before
    with pytest.raises(
        PlanError, match=r"max_in_flight_gb = \S+ is less than all_gather_into_tensor_default has alone, 9.537e-07 GB"
    ):
        found(graph, Overlap(max_in_flight_gb=size / 2))


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_graph_that_has_more_in_flight_as_it_is_keeps_the_limit(at_once: int) -> None:
    made = Handmade(2)
    inputs = [made.batch(16, 16), made.call(aten.mm.default, made.batch(16, 16), made.batch(16, 16)), made.batch(16, 16)]
    launches = [made.call(c10d_functional().all_reduce.default, one, "sum", "0") for one in inputs]
    for _ in inputs:
        made.returns(made.call(aten.mm.default, inputs[0], inputs[2]), "loss")
    for launch in reversed(launches):
        made.returns(made.call(c10d_functional().wait_tensor.default, launch))
    graph = made.finish()
    assert (events(graph.nodes), came_to(graph).exposed) == ("maaammmwww", 0.0)
    bound = moved(graph, Overlap(max_in_flight_gb=at_once * 16 * 16 * 4 / (1 << 30)))
    assert sorted(bound) == sorted(events(graph.nodes))
    flying = [bound[:at].count("a") - bound[:at].count("w") for at in range(len(bound))]
    assert max(flying) == at_once


def test_no_more_memory_is_used_than_allowed() -> None:
    graph = a_layer_each(8)
    slow = {**SECONDS, "all_gather": 1.9}
    free = came_to(graph, seconds=slow)
    bound = came_to(graph, Overlap(max_memory_increase=0.0), slow)
    assert free.peak > free.peak_before
    assert bound.peak <= bound.peak_before
    assert free.exposed < bound.exposed < bound.exposed_before


def test_a_limit_that_the_graph_does_not_keep_as_it_is() -> None:
    graph = a_layer_each(4)
    with pytest.raises(PlanError, match=r"max_memory_increase leaves 9.313e-08 GB, and the graph needs \S+ GB with each"):
        scheduled(graph, estimates(), Overlap(max_memory_increase_gb=0.0), before=100)


def test_where_each_search_takes_too_much_the_order_is_taken_that_needs_least() -> None:
    made = Handmade(2)
    weights = [made.param(f"layers.{n}.weight", 8, 16) for n in range(3)]
    x = made.batch(16, 16)
    gathers = [made.gather(weight) for weight in weights]
    y = made.call(aten.mm.default, x, x)
    made.returns(made.reduced(made.call(aten.neg.default, x)), "grad", "layers.0.weight")
    y = made.call(aten.neg.default, y)
    for full in [made.wait(gather) for gather in gathers]:
        y = made.call(aten.mm.default, full, y)
    made.returns(made.call(aten.sum.default, y), "loss")
    graph = made.finish()
    one = scheduled(graph, estimates(), Overlap(max_memory_increase_gb=0.0), before=6144)
    assert (one.came_to.peak_before, one.came_to.peak, events(one.order or ())) == (8192, 6144, "rwmgwmgwmgwm")


def test_a_cost_that_is_no_number_is_told() -> None:
    graph = a_layer_each(2)
    bad = checked(lambda node: float("nan"), "cost of ours")
    with pytest.raises(SimulationError, match=r"cost of ours says that \w+ \(\S+\) takes nan seconds"):
        scheduled(graph, Estimates(bad, PLAIN), ANY)


def test_without_estimates_there_is_no_schedule() -> None:
    with pytest.raises(PlanError, match='schedule = "auto" goes by seconds on a cluster, and nobody gave any'):
        reorder_by_itself(a_layer_each(2), Overlap(schedule="auto"), None, None)
