"""The scheduler's clock says what the simulator says, and its memory what liveness says, in any order of a graph."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from torch import fx

from pytest_fxbucket.cost.cluster import Cluster
from pytest_fxbucket.cost.costs import Roofline, groups_of
from pytest_fxbucket.cost.memory import StorageNeeds, liveness_of
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.arrange import arranged, relink
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.auto.machine import machine_of
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.step.roles import StepGraph
from suites.benchmarks.simulator import CLUSTER, generated

COSTLY = replace(CLUSTER, view=1e-6, enqueue=3e-6, enqueue_per_byte=1e-9, waiting=2e-6, least=1e-6, collective=4e-6)


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return generated(450)


def any_order(step: StepGraph, seed: int) -> StepGraph:
    """``step`` with its nodes in another legal order."""
    chance = random.Random(seed)
    module = step.graphs["joint"]
    graph = copy.deepcopy(module.graph)
    order = order_of(graph)
    wishes = [
        index + chance.uniform(-60, 60) if node.op == "call_function" else index for index, node in enumerate(order.nodes)
    ]
    wishes[-1] = 1e9
    found = arranged(dict(enumerate(order.before)), wishes)
    relink(graph, [order.nodes[index] for index in found])
    return replace(step, graphs={"joint": fx.GraphModule(module, graph)})


@pytest.mark.parametrize("cluster", [CLUSTER, COSTLY, replace(COSTLY, blocking=True)], ids=["cheap", "costly", "blocking"])
@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_the_simulator_says(step: StepGraph, cluster: Cluster, seed: int) -> None:
    moved = any_order(step, seed)
    graph = moved.graphs["joint"].graph
    machine = machine_of(list(graph.nodes), Estimates(Roofline(cluster, groups_of(moved)), cluster))
    timeline = simulate(moved, cluster)
    assert timeline.exposed > 0
    times = machine.run(range(len(graph.nodes)))
    assert times.exposed == pytest.approx(timeline.exposed, rel=1e-12)
    assert sorted(times.blocked.values()) == pytest.approx(sorted(f.exposed for f in timeline.flights if f.exposed), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_what_lives_in_another_order_is_what_lives_in_the_graph_of_that_order(step: StepGraph, seed: int) -> None:
    before, moved = step.graphs["joint"].graph, any_order(step, seed)
    graph = moved.graphs["joint"].graph
    place = {node.name: at for at, node in enumerate(before.nodes)}
    found = StorageNeeds(before, 512).at([place[node.name] for node in graph.nodes])
    assert tuple(found) == liveness_of(graph, step.inputs["joint"], step.outputs["joint"], 512).at
