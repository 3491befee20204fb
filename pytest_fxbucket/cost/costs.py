"""Seconds of each node of a graph on a cluster: compute by roofline, collectives by their algorithm; or the plan's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from typing import TYPE_CHECKING

from torch import fx

from pytest_fxbucket.compat.c10d import DEFAULT, untwinned
from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.errors import SimulationError, named
from pytest_fxbucket.graph.collectives import flight, is_sent_to_one, read_launch, tensors, tensors_sent
from pytest_fxbucket.graph.flops import bytes_of, counts_flops, flops_of
from pytest_fxbucket.graph.ops import by_operator, is_view_operator
from pytest_fxbucket.graph.storages import is_part
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.process.elsewhere import CIRCUMSTANCES, elsewhere
from pytest_fxbucket.step.mesh import Mesh

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.roles import StepGraph

CostModel = Callable[["fx.Node"], float]
"""Seconds that a node takes on its stream; for a launch, how long its collective is in flight if nothing else is."""
_IDLE = ("placeholder", "get_attr", "output")


def is_free(node: fx.Node) -> bool:
    """Whether ``node`` runs no kernel: inputs, views, parts of lists, and waits, which only hold up others."""
    found = _is_free(node)
    return node.op in _IDLE or is_part(node) if found is None else found


# None for what calls no operator, so that the node itself is asked.
_UNKNOWN: bool | None = None
_is_free = by_operator(lambda op: flight(op) == "wait" or is_view_operator(op), _UNKNOWN)

# These read of their first input only as much as they give, and not the rest of a table.
_PICKING = ("embedding", "index", "_unsafe_index", "index_select", "gather", "take")
_picks = by_operator(lambda op: op.namespace == "aten" and op.overloadpacket.__name__ in _PICKING, False)


class Roofline:
    """Seconds by what ``cluster`` can do; ``ranks_of`` has the ranks of each process group.

    Compute takes as long as its floating point operations or its bytes do, whichever is longer (S. Williams, A. Waterman,
    D. Patterson, 2009).
    """

    def __init__(self, cluster: Cluster, ranks_of: Callable[[str, int], Sequence[int]]) -> None:
        self._cluster, self._ranks_of = cluster, ranks_of
        self._known: dict[tuple[object, ...], float] = {}
        self._bytes: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> float:
        """Seconds of ``node``."""
        launch = read_launch(node)
        if launch is None:
            return 0.0 if is_free(node) else self._compute(node)
        size = launched_bytes(node)
        is_to_one = is_sent_to_one(node)
        key = ("launch", launch.kind, launch.group, launch.ranks, size, is_to_one)
        if key not in self._known:
            ranks = self._ranks_of(launch.group, launch.ranks if isinstance(launch.ranks, int) else 0)
            if is_to_one and len(ranks) > 1:  # round a ring, whose last link leads back to the first rank
                self._known[key] = transfer_seconds(size, ranks[-1], ranks[0], self._cluster)
            else:
                self._known[key] = collective_seconds(launch.kind, size, ranks, self._cluster)
        return self._known[key]

    def _compute(self, node: fx.Node) -> float:
        cluster = self._cluster
        given = [self._moved(source) for source in inputs_of(node)]
        if _picks(node):
            given[0] = min(given[0], self._moved(node))
        moved = self._moved(node) + sum(given)
        seconds = moved / (cluster.memory_bandwidth * cluster.memory_efficiency)
        if counts_flops(node) and (flops := self._flops(node)):
            seconds = max(seconds, flops / (rate_of(node, cluster) * cluster.compute_efficiency))
        return max(seconds, cluster.least)

    def _moved(self, node: fx.Node) -> int:
        """Bytes of what ``node`` gives; kept, since most nodes are read several times."""
        found = self._bytes.get(node)
        if found is None:
            found = self._bytes[node] = bytes_of(node)
        return found

    def _flops(self, node: fx.Node) -> float:
        """Floating point operations of ``node``, counted once for equal operators on equal shapes and constants."""
        of = [one for source in (*inputs_of(node), node) for one in tensors(source.meta.get("val"))]
        numbers = [one for one in (*node.args, *node.kwargs.values()) if not isinstance(one, fx.Node)]
        key = ("flops", node.target, tuple([one.shape for one in of]), str(numbers))
        if key not in self._known:
            self._known[key] = flops_of(node)
        return self._known[key]


def rate_of(node: fx.Node, cluster: Cluster) -> float:
    """Floating point operations a second of ``node``'s dtype."""
    dtype = next((str(one.dtype).removeprefix("torch.") for one in tensors(node.meta.get("val"))), "float32")
    return cluster.flops.get(dtype, cluster.flops["float32"])


def launched_bytes(node: fx.Node) -> int:
    """Bytes of the larger side of the launch ``node``."""
    sent = sum(one.numel() * one.element_size() for source in tensors_sent(node) for one in tensors(source.meta.get("val")))
    brought = sum(one.numel() * one.element_size() for one in tensors(node.meta.get("val")))
    return int(max(sent, brought))


def enqueue_seconds(size: int, cluster: Cluster) -> float:
    """Seconds that the host takes to launch a collective of ``size`` bytes."""
    return cluster.launch + cluster.enqueue + cluster.enqueue_per_byte * size


def checked(model: Callable[[fx.Node], float | None], name: str, fallback: CostModel | None = None) -> CostModel:
    """A user's cost model ``model``, called ``name``, with its answers checked; where it gives None, ``fallback`` is asked.

    The result raises :class:`SimulationError` where ``model`` raises, or gives something else than a number of seconds.
    """

    def seconds(node: fx.Node) -> float:
        try:
            found = model(node)
        except Exception as error:
            raise SimulationError(f"{name} raised {named(error)} for {node.name} ({node.target})") from error
        if found is None and fallback is not None:
            return fallback(node)
        if not isinstance(found, (int, float)) or not isfinite(found) or found < 0:
            raise SimulationError(f"{name} says that {node.name} ({node.target}) takes {found!r} seconds, expected 0 or more")
        return float(found)

    return seconds


# Collectives by the algorithms of NCCL: rings, and trees of all-reduces. A ring sends every byte along all its links at once, a
# tree up and down in as many hops as it is deep. Time is latency of hops, and bytes over the slowest link, as NCCL's own tuning
# has it (ncclTopoGetAlgoTime in its graph/tuning.cc).


def collective_seconds(kind: str, size: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Seconds of a collective ``kind`` among ``ranks``, of which ``size`` bytes are the larger side.

    ``kind`` as :data:`pytest_fxbucket.graph.collectives.Kind`; one that is not known counts as an all-reduce.
    """
    count = len(ranks)
    if count < 2:
        return cluster.collective
    if kind in ("all_gather", "reduce_scatter"):
        seconds = _ring(size * (count - 1) / count, count - 1, ranks, cluster)
    elif kind == "all_to_all":
        seconds = _pairs(size, ranks, cluster)
    elif kind == "broadcast":
        seconds = _ring(size, count - 1, ranks, cluster)
    else:
        ring = _ring(2 * size * (count - 1) / count, 2 * (count - 1), ranks, cluster)
        seconds = min(ring, _tree(size, ranks, cluster))  # as NCCL takes the one that it expects to be faster
    return cluster.collective + seconds


def transfer_seconds(size: int, here: int, there: int, cluster: Cluster) -> float:
    """Seconds in which rank ``here`` sends ``size`` bytes to rank ``there``."""
    link = cluster.within if len(cluster.on_nodes((here, there))) == 1 else cluster.between
    return cluster.collective + link.latency + size / (link.bandwidth * cluster.network_efficiency)


def _ring(size: float, hops: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """``size``: bytes that each link of the ring carries."""
    nodes = cluster.on_nodes(ranks)
    rounds = hops / (len(ranks) - 1)  # how often all go round
    # Ranks fill nodes in order, so that the count - 1 hops of a round leave a node len(nodes) - 1 times.
    far = rounds * (len(nodes) - 1)
    latency = far * cluster.between.latency + (hops - far) * cluster.within.latency
    return latency + size / _bandwidth(nodes, cluster)


def _tree(size: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Up and down a tree of nodes, each a chain of its devices."""
    nodes = cluster.on_nodes(ranks)
    chain = nodes[-1] - 1
    latency = 2 * (chain * cluster.within.latency + log2(len(nodes)) * cluster.between.latency)
    return latency + 2 * size / _bandwidth(nodes, cluster)  # every byte goes up, and its sum down


def _pairs(size: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Every rank sends a part to every other one; parts to other nodes go over the slower link."""
    nodes, count = cluster.on_nodes(ranks), len(ranks)
    # The rank on the fullest node sends most within it, that on the emptiest most to others.
    near = size * (nodes[-1] - 1) / count / cluster.within.bandwidth
    far = size * (count - nodes[0]) / count / cluster.between.bandwidth
    latency = (cluster.between if len(nodes) > 1 else cluster.within).latency
    return latency + max(near, far) / cluster.network_efficiency  # a device uses its links of both kinds at once


def _bandwidth(nodes: Sequence[int], cluster: Cluster) -> float:
    """Bytes a second of the slowest link; ``nodes``: how many ranks each has, ascending.

    A ring leaves a node through the links of all the devices that it has there.
    """
    bandwidth = cluster.within.bandwidth
    if len(nodes) > 1:
        leaving = nodes[0] * cluster.between.bandwidth
        # With one rank a node nothing goes over the links within nodes.
        bandwidth = min(bandwidth, leaving) if nodes[-1] > 1 else leaving
    return bandwidth * cluster.network_efficiency


# The cost model that a plan has of its own, and the process groups that costs are told for.


def own_cost(plan: Plan, step: StepGraph, cluster: Cluster) -> CostModel | None:
    """The plan's own cost model; what it does not know is told for the process groups of ``step``. None if it has none.

    One that does not measure is asked again, and raises :class:`SimulationError` where it goes by more than the node.
    """
    if plan.cluster is None or plan.cluster.cost is None:
        return None
    name = plan.cluster.cost
    where = f'{plan.path}: [cluster] cost = "{name}"'
    model = import_callable(name, f"{plan.path}: [cluster] cost")
    return _held(checked(model, where, Roofline(cluster, groups_of(step))), where)


def _held(ask: CostModel, where: str) -> CostModel:
    """``ask``, which must say the same elsewhere, unless it says something else here, too: then it measures."""
    measures = False

    def seconds(node: fx.Node) -> float:
        nonlocal measures
        found = ask(node)
        if measures:
            return found
        try:
            with elsewhere():
                other = ask(node)
        except SimulationError as error:
            raise SimulationError(f"{error}, when it is asked again, {'; '.join(CIRCUMSTANCES)}") from error
        measures = other != found != ask(node)
        if other != found and not measures:
            raise SimulationError(
                f"{where} says that {node.name} ({node.target}) takes {found:g} seconds, and {other:g} when it is asked again, "
                f"{'; '.join(CIRCUMSTANCES)}"
            )
        return found

    return seconds


def groups_of(step: StepGraph) -> _Groups:
    """Ranks of each process group of ``step``, by the name that its launches have."""
    mesh = Mesh(step.mesh)
    return _Groups({**mesh.groups(step.rank), DEFAULT: tuple(range(mesh.size))})


@dataclass(frozen=True)
class _Groups:
    """Gives the ranks of a group by its name; a group that nobody knows has ranks 0 to ``count`` - 1."""

    known: Mapping[str, Sequence[int]]

    def __call__(self, group: str, count: int) -> Sequence[int]:
        return self.known.get(group) or self.known.get(untwinned(group)) or range(max(count, 1))
