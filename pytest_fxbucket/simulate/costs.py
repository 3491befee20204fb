"""Seconds of each node of a graph on a cluster: compute by roofline, collectives by their algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.graph.collectives import is_wait, read_launch, tensors, tensors_sent
from pytest_fxbucket.graph.flops import bytes_moved, flops_of
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.graph.storages import is_part
from pytest_fxbucket.simulate.network import collective_seconds

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.simulate.cluster import Cluster

CostModel = Callable[["fx.Node"], float]
"""Seconds that a node takes on its stream; of a launch those that its collective is in flight when nothing else is."""
_IDLE = ("placeholder", "get_attr", "output")


def is_free(node: fx.Node) -> bool:
    """Whether ``node`` runs no kernel: inputs, views, parts of lists, and waits, which only hold up others."""
    return node.op in _IDLE or is_wait(node) or is_view(node) or is_part(node)


class Roofline:
    """Seconds by what ``cluster`` can do; ``ranks_of`` has the ranks of each process group.

    Compute takes as long as its floating point operations or its bytes do, whichever is longer (S. Williams, A. Waterman,
    D. Patterson, 2009).
    """

    def __init__(self, cluster: Cluster, ranks_of: Callable[[str, int], Sequence[int]]) -> None:
        self._cluster, self._ranks_of = cluster, ranks_of
        self._known: dict[tuple[object, ...], float] = {}

    def __call__(self, node: fx.Node) -> float:
        """Seconds of ``node``."""
        if is_free(node):
            return 0.0
        launch = read_launch(node)
        if launch is None:
            return self._compute(node)
        size = launched_bytes(node)
        key = ("launch", launch.kind, launch.group, launch.ranks, size)
        if key not in self._known:
            ranks = self._ranks_of(launch.group, launch.ranks if isinstance(launch.ranks, int) else 0)
            self._known[key] = collective_seconds(launch.kind, size, ranks, self._cluster)
        return self._known[key]

    def _compute(self, node: fx.Node) -> float:
        cluster = self._cluster
        seconds = bytes_moved(node) / (cluster.memory_bandwidth * cluster.memory_efficiency)
        if flops := flops_of(node):
            seconds = max(seconds, flops / (rate_of(node, cluster) * cluster.compute_efficiency))
        return max(seconds, cluster.least)


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


def checked(model: CostModel, name: str, fallback: CostModel | None = None) -> CostModel:
    """``model``, a user's own; what it does not know, None, ``fallback`` tells.

    Raises :class:`SimulationError` for what is no number of seconds.
    """

    def seconds(node: fx.Node) -> float:
        found = model(node)
        if found is None and fallback is not None:
            return fallback(node)
        if not isinstance(found, (int, float)) or not isfinite(found) or found < 0:
            raise SimulationError(f"{name} says that {node.name} ({node.target}) takes {found!r} seconds, expected 0 or more")
        return float(found)

    return seconds
