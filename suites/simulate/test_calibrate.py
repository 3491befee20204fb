"""A cluster is found again from what it was simulated to do; and timelines of other graphs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import Roofline, collective_seconds, enqueue_seconds, groups_of, is_free, launched_bytes
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.simulate.calibrate import MeasuredStretch, calibrate
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.step.roles import MeshDim, StepGraph
from suites.graph.handmade import Handmade, aten

RANKS = 4
ASSUMED = Cluster(
    name="assumed",
    flops={"float32": 1e11},
    memory_bandwidth=1e10,
    memory=1e12,
    devices_per_node=8,
    within=Link(1e9, 1e-5),
    between=Link(1e9, 1e-5),
    launch=1e-6,
    collective=1e-5,
    least=1e-6,
)
HOST = replace(
    ASSUMED,
    blocking=True,
    least=0.0,
    launch=9e-6,
    view=4e-6,
    enqueue=2e-4,
    enqueue_per_byte=4e-10,
    waiting=3e-5,
    compute_efficiency=0.4,
    memory_efficiency=0.7,
    within=Link(2e8, 3e-5),
    collective=4e-5,
)
"""What computes itself."""
DEVICE = replace(HOST, blocking=False, least=2e-5, enqueue_per_byte=0.0)


def step_of(sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> StepGraph:
    """Of each size products, sums and views, and two gathers: one waited for at once, one behind compute."""
    made = Handmade(RANKS)
    for size in sizes:
        a, shard = made.batch(size, size), made.batch(size * size // RANKS)
        early = made.gather(shard)
        for _ in range(2):
            made.call(aten.mm.default, a, a)
            made.call(aten.t.default, made.call(aten.add.Tensor, a, a))
            made.call(aten.t.default, a)
        whole = made.wait(early)
        made.call(aten.neg.default, made.wait(made.gather(shard)))
        made.call(aten.neg.default, whole)
    module = fx.GraphModule(torch.nn.Module(), made.finish())
    mesh = (MeshDim("dp_shard", RANKS),)
    return StepGraph({"joint": module}, {"joint": tuple(made.inputs)}, {"joint": tuple(made.outputs)}, (), (), mesh, 0)


def nodes_of(step: StepGraph) -> list[fx.Node]:
    return [node for node in step.graphs["joint"].graph.nodes if node.op == "call_function"]


def measured(step: StepGraph, cluster: Cluster) -> Iterator[MeasuredStretch]:
    """What ``cluster`` would be measured to do, a stretch for each node."""
    timeline, cost = simulate(step, cluster), Roofline(cluster, groups_of(step))
    exposed = {flight.node: flight.exposed for flight in timeline.flights}
    for node in nodes_of(step):
        seconds = cluster.view if is_view(node) else cluster.launch
        if launch_kind(node) is not None:
            seconds = enqueue_seconds(launched_bytes(node), cluster)
        elif is_wait(node):
            seconds = cluster.waiting + (exposed[node.all_input_nodes[0].name] if cluster.blocking else 0.0)
        elif cluster.blocking:
            seconds += cost(node)
        yield MeasuredStretch("joint", (node.name,), seconds)
        if not cluster.blocking and not is_free(node):
            yield MeasuredStretch("joint", (node.name,), cost(node), "network" if launch_kind(node) is not None else "device")


@pytest.mark.parametrize("true", [HOST, DEVICE], ids=["host", "device"])
def test_a_cluster_is_found_from_what_it_does(true: Cluster) -> None:
    step = step_of()
    found = calibrate(step, list(measured(step, true)), replace(ASSUMED, blocking=true.blocking))
    for error in found.errors.values():
        assert error.middle < 0.03
        assert error.most < 0.1
    assert list(found.errors) == ["compute", "launches", "collectives"]
    got = found.cluster
    for name in ("launch", "view", "enqueue", "waiting", "compute_efficiency", "memory_efficiency", "least"):
        assert getattr(got, name) == pytest.approx(getattr(true, name), rel=0.05), name
    empty, wanted = (collective_seconds("all_gather", 0, range(RANKS), cluster) for cluster in (got, true))
    assert empty == pytest.approx(wanted, rel=0.1)
    assert got.within.bandwidth == pytest.approx(true.within.bandwidth, rel=0.05)
    assert simulate(step, got).seconds == pytest.approx(simulate(step, true).seconds, rel=0.02)
    assert got.between == ASSUMED.between


def test_who_gets_more_than_there_is_has_more() -> None:
    step, assumed = step_of(), replace(ASSUMED, blocking=True, flops={"float32": 2e10}, memory_bandwidth=5e9)
    got = calibrate(step, list(measured(step, HOST)), assumed).cluster
    assert (got.compute_efficiency, got.memory_efficiency) == (1.0, 1.0)  # a preset takes no more
    assert got.flops["float32"] == pytest.approx(0.4 * 1e11, rel=0.05)
    assert got.memory_bandwidth == pytest.approx(0.7 * 1e10, rel=0.05)


def test_another_step_is_then_predicted() -> None:
    step, other = step_of(), step_of((96, 300, 700))
    found = calibrate(step, list(measured(step, HOST)), replace(ASSUMED, blocking=True))
    assert simulate(other, found.cluster).seconds == pytest.approx(simulate(other, HOST).seconds, rel=0.03)


def test_stretches_of_several_nodes_do_as_well() -> None:
    step = step_of()
    each = list(measured(step, HOST))
    kinds = [(launch_kind(node) is not None, is_wait(node)) for node in nodes_of(step)]
    joined: list[MeasuredStretch] = []
    for number, one in enumerate(each):
        if joined and kinds[number] == (False, False) == kinds[number - 1]:
            joined[-1] = MeasuredStretch("joint", joined[-1].nodes + one.nodes, joined[-1].seconds + one.seconds)
        else:
            joined.append(one)
    assert len(joined) < len(each)
    found = calibrate(step, joined, replace(ASSUMED, blocking=True))
    assert simulate(step, found.cluster).seconds == pytest.approx(simulate(step, HOST).seconds, rel=0.03)


def test_what_was_not_measured_stays_as_it_was() -> None:
    free = replace(ASSUMED, launch=0.0, collective=0.0)
    found = calibrate(step_of(), [], free)
    assert found.cluster == free
    assert str(found) == "error left: nothing was measured"


def test_a_link_that_was_not_measured_stays_as_it_was_though_memory_is_slower() -> None:
    wide = replace(ASSUMED, between=Link(100 * ASSUMED.memory_bandwidth, 1e-5))
    assert calibrate(step_of(), list(measured(step_of(), DEVICE)), wide).cluster.between == wide.between


def test_the_error_that_is_left_is_said() -> None:
    step = step_of()
    every = [replace(one, seconds=one.seconds * (2.0 if n % 2 else 1.0)) for n, one in enumerate(measured(step, HOST))]
    found = calibrate(step, every, replace(ASSUMED, blocking=True))
    assert 0.1 < found.errors["compute"].middle <= found.errors["compute"].most
    assert str(found).startswith("error left: compute ")


@pytest.mark.parametrize(
    ("stretch", "words"),
    [
        (MeasuredStretch("joint", ("mm_99",), 1.0), "^the timeline is of another graph: mm_99 is not in the joint graph$"),
        (
            MeasuredStretch("joint", (), 1.0),
            "^the timeline is of another graph: a stretch without nodes is not in the joint graph$",
        ),
        (MeasuredStretch("forward", ("mm_default",), 1.0), "^the timeline has a graph forward, the step has joint$"),
        (
            MeasuredStretch("joint", ("mm_default",), float("nan")),
            "^mm_default of the joint graph took nan seconds, expected 0 or more$",
        ),
        (
            MeasuredStretch("joint", ("mm_default",), -1.0),
            "^mm_default of the joint graph took -1.0 seconds, expected 0 or more$",
        ),
    ],
)
def test_what_is_not_of_the_step_is_refused(stretch: MeasuredStretch, words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        calibrate(step_of((64,)), [stretch], ASSUMED)


def test_views_launches_and_waits_cost_the_host() -> None:
    made = Handmade(RANKS)
    shard = made.param("w", 250)  # 4,000 bytes gathered
    made.call(aten.neg.default, made.call(aten.t.default, made.wait(made.gather(shard))))
    module = fx.GraphModule(torch.nn.Module(), made.finish())
    step = replace(step_of((64,)), graphs={"joint": module}, inputs={"joint": tuple(made.inputs)}, outputs={"joint": ()})
    calls = replace(ASSUMED, launch=1e-6, view=2e-6, enqueue=4e-6, enqueue_per_byte=2e-9, waiting=16e-6)
    assert simulate(step, calls, lambda node: 0.0).seconds == pytest.approx((1 + 4 + 8 + 16 + 2 + 1) * 1e-6)
