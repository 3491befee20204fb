"""Seconds of each node of a graph on a cluster: compute by roofline, collectives by their algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from torch import fx

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.cost.network import collective_seconds, transfer_seconds
from pytest_fxbucket.errors import SimulationError, named
from pytest_fxbucket.graph.collectives import flight, is_sent_to_one, read_launch, tensors, tensors_sent
from pytest_fxbucket.graph.flops import bytes_of, counts_flops, flops_of
from pytest_fxbucket.graph.ops import by_operator, is_view_operator
from pytest_fxbucket.graph.storages import is_part

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster

CostModel = Callable[["fx.Node"], float]
"""Seconds that a node takes on its stream; of a launch those that its collective is in flight when nothing else is."""
_IDLE = ("placeholder", "get_attr", "output")


def is_free(node: fx.Node) -> bool:
    """Whether ``node`` runs no kernel: inputs, views, parts of lists, and waits, which only hold up others."""
    found = _is_free(node)
    return node.op in _IDLE or is_part(node) if found is None else found


_UNKNOWN: bool | None = None
_is_free = by_operator(lambda op: flight(op) == "wait" or is_view_operator(op), _UNKNOWN)


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
        moved = self._moved(node) + sum([self._moved(source) for source in inputs_of(node)])
        seconds = moved / (cluster.memory_bandwidth * cluster.memory_efficiency)
        if counts_flops(node) and (flops := self._flops(node)):
            seconds = max(seconds, flops / (rate_of(node, cluster) * cluster.compute_efficiency))
        return max(seconds, cluster.least)

    def _moved(self, node: fx.Node) -> int:
        """Bytes of what ``node`` gives; most nodes are read several times."""
        found = self._bytes.get(node)
        if found is None:
            found = self._bytes[node] = bytes_of(node)
        return found

    def _flops(self, node: fx.Node) -> float:
        """Of nodes of one operator on equal shapes those of the first."""
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
    """``model``, a user's own, called ``name``; what it does not know, None, ``fallback`` tells.

    What it gives raises :class:`SimulationError` where ``model`` raises, or gives what is no number of seconds.
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
