"""The clock of a graph in any order of its nodes: one compute stream, one in order for each process group, and the host.

It has the rules of :mod:`pytest_fxbucket.simulate.simulator`, but works on numbers alone, since a schedule tries many orders.
People and checks ask the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.cost.costs import enqueue_seconds, is_free, launched_bytes
from pytest_fxbucket.graph.collectives import flight_of, read_launch
from pytest_fxbucket.graph.ops import is_view

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.auto.estimates import Estimates

COMPUTE, WAIT = -1, -2


@dataclass(frozen=True, slots=True)
class Times:
    """What one order of a graph comes to."""

    exposed: float
    """Seconds that waits blocked compute."""
    blocked: dict[int, float]
    """Of that by launch."""


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """Costs of a graph's nodes, which are named by their place in it."""

    seconds: list[float]
    """On the node's stream."""
    host: list[float]
    """That the host takes to call it."""
    stream: list[int]
    """:data:`COMPUTE`, :data:`WAIT`, or the number of a process group's."""
    launch: list[int]
    """Of a launch, its waits, and views of what it brings: that launch; of other nodes -1."""
    bytes: dict[int, int]
    """Of each launch the larger side."""
    streams: int
    blocking: bool
    """Whether the host itself computes."""

    def run(self, order: Iterable[int]) -> Times:
        """Run the nodes in ``order``."""
        # ``host`` and ``compute`` say until when each is busy. A node starts when the host has called it and its stream is
        # free. Compute stands still for a flight only at a wait, and that time is what counts as exposed.
        host = compute = exposed = 0.0
        free, end = [0.0] * self.streams, dict[int, float]()
        blocked: dict[int, float] = {}
        for node in order:
            now = host if host > compute else compute
            stream, seconds = self.stream[node], self.seconds[node]
            if stream == WAIT:
                launch = self.launch[node]
                if launch in end:
                    late = end[launch] - now
                    if late > 0:
                        exposed += late
                        blocked[launch] = blocked.get(launch, 0.0) + late
                    compute = max(compute, end[launch])
                    if self.blocking:
                        host = max(host, end[launch])
                    host += self.host[node]
                continue
            host += self.host[node]
            if stream >= 0:
                end[node] = free[stream] = max(host, compute, free[stream]) + seconds
            elif seconds:
                compute = max(host, compute) + seconds
                if self.blocking:
                    host = compute
        return Times(exposed, blocked)


def machine_of(nodes: Sequence[fx.Node], estimates: Estimates) -> NodeCosts:
    """Costs of ``nodes``, all of a graph in order. Raises what ``estimates`` do."""
    cluster = estimates.cluster
    asked = [node for node in nodes if flight_of(node) != "wait" and not is_free(node)]
    cost = dict(zip(asked, estimates.of(asked), strict=True))
    index = {node: place for place, node in enumerate(nodes)}
    groups: dict[str, int] = {}
    seconds, host, stream, launch = ([0.0] * len(nodes), [0.0] * len(nodes), [COMPUTE] * len(nodes), [-1] * len(nodes))
    sizes: dict[int, int] = {}
    for place, node in enumerate(nodes):
        kind = flight_of(node)
        if kind is not None and kind != "wait":
            said = read_launch(node)
            assert said is not None
            sizes[place] = launched_bytes(node)
            seconds[place], launch[place] = cost[node], place
            host[place] = enqueue_seconds(sizes[place], cluster)
            stream[place] = groups.setdefault(said.group, len(groups))
        elif kind == "wait" or is_free(node):
            launch[place] = next((found for one in inputs_of(node) if (found := launch[index[one]]) >= 0), -1)
            host[place] = cluster.waiting if kind == "wait" else cluster.view if is_view(node) else 0.0
            stream[place] = WAIT if kind == "wait" else COMPUTE
        else:
            seconds[place], host[place] = cost[node], cluster.launch
    return NodeCosts(seconds, host, stream, launch, sizes, len(groups), cluster.blocking)
