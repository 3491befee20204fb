"""Seconds of a collective, by the algorithms of NCCL: rings, and trees of all-reduces; pure arithmetic.

A ring sends every byte along all its links at once, a tree up and down in as many hops as it is deep. Time is latency of hops,
and bytes over the slowest link, as NCCL's own tuning has it (``ncclTopoGetAlgoTime`` in its ``graph/tuning.cc``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster


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
        seconds = min(ring, _tree(size, ranks, cluster))
    return cluster.collective + seconds


def transfer_seconds(size: int, here: int, there: int, cluster: Cluster) -> float:
    """Seconds in which rank ``here`` sends ``size`` bytes to rank ``there``."""
    link = cluster.within if cluster.nodes_of((here, there)) == 1 else cluster.between
    return cluster.collective + link.latency + size / (link.bandwidth * cluster.network_efficiency)


def _ring(size: float, hops: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """``size``: bytes that each link of the ring carries."""
    nodes = cluster.nodes_of(ranks)
    rounds = hops / (len(ranks) - 1)  # how often all go round
    far = rounds * (nodes - 1)
    latency = far * cluster.between.latency + (hops - far) * cluster.within.latency
    return latency + size / _bandwidth(ranks, nodes, cluster)


def _tree(size: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Up and down a tree of nodes, each a chain of its devices."""
    nodes = cluster.nodes_of(ranks)
    chain = ceil(len(ranks) / nodes) - 1
    latency = 2 * (chain * cluster.within.latency + log2(nodes) * cluster.between.latency)
    return latency + 2 * size / _bandwidth(ranks, nodes, cluster)


def _pairs(size: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Every rank sends a part to every other one; parts to other nodes go over the slower link."""
    nodes, count = cluster.nodes_of(ranks), len(ranks)
    here = ceil(count / nodes)
    near = size * (here - 1) / count / cluster.within.bandwidth
    far = size * (count - here) / count / cluster.between.bandwidth
    latency = (cluster.between if nodes > 1 else cluster.within).latency
    return latency + max(near, far) / cluster.network_efficiency


def _bandwidth(ranks: Sequence[int], nodes: int, cluster: Cluster) -> float:
    """Bytes a second of the slowest link. A ring leaves a node through the links of all the devices that it has there."""
    bandwidth = cluster.within.bandwidth
    if nodes > 1:
        leaving = len(ranks) / nodes * cluster.between.bandwidth
        bandwidth = min(bandwidth, leaving) if len(ranks) > nodes else leaving
    return bandwidth * cluster.network_efficiency
