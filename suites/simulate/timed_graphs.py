"""Graphs written by hand of which each node takes as many microseconds as is said, simulated."""

from __future__ import annotations

import torch
from torch import fx

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.simulate.timeline import Flight, Timeline
from pytest_fxbucket.step.mesh import fake_mesh, shard_mesh
from pytest_fxbucket.step.roles import MeshDim, StepGraph
from suites.graph.handmade import Handmade, aten, c10d

FREE = Cluster(
    name="free",
    flops={"float32": 1e12},
    memory_bandwidth=1e9,
    memory=1e12,
    devices_per_node=8,
    within=Link(1e9, 0.0),
    between=Link(1e9, 0.0),
)
"""Calls cost nothing, and memory is never short; seconds of nodes are said in each test."""
RANKS = 4


def us(seconds: float) -> float:
    """Microseconds, to the thousandth."""
    return round(seconds * 1e6, 3)


class Timed(Handmade):
    """A graph in the making, with what its nodes take."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.took: dict[str, float] = {}
        self.given_in = self.batch(4)

    def timed(self, node: fx.Node, microseconds: float) -> fx.Node:
        self.took[node.name] = microseconds
        return node

    def work(self, microseconds: float, *reads: fx.Node) -> fx.Node:
        """Compute that needs the last of ``reads``."""
        return self.timed(self.call(aten.neg.default, reads[-1] if reads else self.given_in), microseconds)

    def launch(self, microseconds: float, sent: fx.Node | None = None, group: str = "0") -> fx.Node:
        """An all-gather of a parameter's shard, or of ``sent``."""
        return self.timed(self.gather(self.shard() if sent is None else sent, group=group), microseconds)

    def shard(self, elements: int = 4) -> fx.Node:
        """A parameter's shard, as if it had been there before all else."""
        before = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(before):
            return self.param(f"p{len(self.inputs)}", elements)

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.finish())

    def step(self) -> StepGraph:
        phase = {"joint": self.module()}
        inputs, outputs = {"joint": tuple(self.inputs)}, {"joint": tuple(self.outputs)}
        return StepGraph(phase, inputs, outputs, (), (), (MeshDim("dp_shard", RANKS),), 0)

    def cost(self, node: fx.Node) -> float:
        return self.took[node.name] * 1e-6

    def simulated(self, cluster: Cluster = FREE) -> Timeline:
        with fake_mesh(shard_mesh(RANKS), 0):
            return simulate(self.step(), cluster, self.cost)


def only(timeline: Timeline) -> Flight:
    (flight,) = timeline.flights
    return flight


__all__ = ["FREE", "RANKS", "Timed", "aten", "c10d", "only", "us"]
