"""Seconds of collectives against the arithmetic of NCCL (PERFORMANCE.md of nccl-tests): bus bandwidth, rings and trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import collective_seconds, transfer_seconds

WITHIN, BETWEEN = 400e9, 40e9
CLUSTER = Cluster(
    name="two speeds",
    flops={"float32": 1e12},
    memory_bandwidth=1e12,
    memory=1e12,
    devices_per_node=8,
    within=Link(WITHIN, 2e-6),
    between=Link(BETWEEN, 5e-6),
)
NO_LATENCY = replace(CLUSTER, within=Link(WITHIN, 0.0), between=Link(BETWEEN, 0.0))
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "other")
SIZE = 2**30


def factor(kind: str, n: int) -> float:
    """What nccl-tests multiplies bytes a second with for the bandwidth that the links have."""
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(kind, (n - 1) / n)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_bus_bandwidth_within_a_node_is_that_of_the_links(kind: str, n: int) -> None:
    seconds = collective_seconds(kind, SIZE, range(n), NO_LATENCY)
    assert SIZE / seconds * factor(kind, n) == pytest.approx(WITHIN)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
@pytest.mark.parametrize(
    ("ranks", "bandwidth"),
    [
        (range(32), 8 * BETWEEN),  # a ring leaves each node through all its links
        (range(0, 32, 8), BETWEEN),  # one rank on each
        (range(0, 32, 4), 2 * BETWEEN),
        (range(0, 32, 2), 4 * BETWEEN),
    ],
)
def test_the_bus_bandwidth_between_nodes_is_that_of_the_links_that_leave_one(kind: str, ranks: range, bandwidth: float) -> None:
    seconds = collective_seconds(kind, SIZE, ranks, NO_LATENCY)
    assert SIZE / seconds * factor(kind, len(ranks)) == pytest.approx(bandwidth)


def test_a_fast_network_is_no_faster_than_the_links_within_a_node() -> None:
    fast = replace(NO_LATENCY, between=Link(WITHIN, 0.0))
    seconds = collective_seconds("all_gather", SIZE, range(32), fast)
    assert SIZE / seconds * factor("all_gather", 32) == pytest.approx(WITHIN)


def test_parts_for_other_nodes_go_over_each_ranks_own_link() -> None:
    seconds = collective_seconds("all_to_all", SIZE, range(32), NO_LATENCY)
    assert seconds == pytest.approx(SIZE * 24 / 32 / BETWEEN)


def test_efficiency_is_a_part_of_the_bandwidth() -> None:
    for kind in KINDS:
        whole = collective_seconds(kind, SIZE, range(32), NO_LATENCY)
        assert collective_seconds(kind, SIZE, range(32), replace(NO_LATENCY, network_efficiency=0.5)) == pytest.approx(
            2 * whole
        )


@pytest.mark.parametrize(
    ("kind", "ranks", "microseconds"),
    [
        ("all_gather", range(8), 7 * 2),
        ("reduce_scatter", range(8), 7 * 2),
        ("all_gather", range(32), 28 * 2 + 3 * 5),  # of 31 hops three go to another node
        ("all_gather", range(0, 32, 8), 3 * 5),
        ("broadcast", range(32), 28 * 2 + 3 * 5),
        ("all_reduce", range(4), 2 * 3 * 2),  # a tree within a node is a chain
        ("all_reduce", range(32), 2 * (7 * 2 + 2 * 5)),  # up and down: a chain within nodes, two hops deep between four of them
        ("all_to_all", range(8), 2),
        ("all_to_all", range(32), 5),
    ],
)
def test_what_carries_nothing_takes_its_hops(kind: str, ranks: range, microseconds: float) -> None:
    assert collective_seconds(kind, 0, ranks, CLUSTER) * 1e6 == pytest.approx(microseconds)


def test_a_tree_is_faster_for_little_on_many_nodes_and_a_ring_for_much() -> None:
    many = range(512)
    ring_hops = 2 * (511 * 2 + 63 * (5 - 2)) * 1e-6
    tree_hops = 2 * (7 * 2 + 6 * 5) * 1e-6
    assert collective_seconds("all_reduce", 1024, many, CLUSTER) == pytest.approx(tree_hops + 2 * 1024 / (8 * BETWEEN))
    much = 2**40
    assert collective_seconds("all_reduce", much, many, CLUSTER) == pytest.approx(
        ring_hops + 2 * 511 / 512 * much / (8 * BETWEEN)
    )


def test_a_collective_alone_takes_what_any_takes() -> None:
    assert collective_seconds("all_reduce", SIZE, range(1), replace(CLUSTER, collective=3e-6)) == 3e-6
    assert collective_seconds("all_to_all", 0, range(8), replace(CLUSTER, collective=3e-6)) == pytest.approx(5e-6)


def test_a_transfer_goes_over_one_link() -> None:
    assert transfer_seconds(SIZE, 0, 7, CLUSTER) == pytest.approx(2e-6 + SIZE / WITHIN)
    assert transfer_seconds(SIZE, 7, 8, CLUSTER) == pytest.approx(5e-6 + SIZE / BETWEEN)


@given(st.sampled_from(KINDS), st.integers(2, 300), st.integers(1, 2**33), st.integers(1, 2**33))
def test_more_bytes_never_take_less(kind: str, ranks: int, size: int, more: int) -> None:
    seconds = collective_seconds(kind, size, range(ranks), CLUSTER)
    assert 0 < seconds <= collective_seconds(kind, size + more, range(ranks), CLUSTER)


@given(st.sampled_from(KINDS), st.sets(st.integers(0, 99), min_size=2), st.integers(0, 2**33))
def test_no_collective_beats_its_links(kind: str, chosen: set[int], size: int) -> None:
    """Also among ranks that fill nodes unevenly."""
    ranks = sorted(chosen)
    here = min(sum(rank // 8 == node for rank in ranks) for node in {rank // 8 for rank in ranks})
    whole = size * (len(ranks) - 1) / len(ranks)
    least = whole / WITHIN if here == len(ranks) else 0.0
    if here < len(ranks):
        # A rank has one link that leaves its node, and gets what is outside of that through those of all ranks there.
        outside = size * (len(ranks) - here) / len(ranks)
        least = outside / BETWEEN if kind == "all_to_all" else whole / (here * BETWEEN)
    assert collective_seconds(kind, size, ranks, CLUSTER) >= least
