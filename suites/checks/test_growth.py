"""What the pass and the checks do grows with the graph, and not with its square; counted in calls, which no clock disturbs."""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log
from unittest import mock

import pytest
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.passes import manual_overlap_bucketing
from suites.benchmarks.decoder import RANKS
from suites.benchmarks.passes import ROWS, Graphs

SMALL, LARGE = 2, 8
MOST = 1.1
"""nodes to this power."""
PEAK = 1.5
"""Of a deepcopy of the graph."""


@pytest.fixture(scope="module")
def sizes() -> tuple[Graphs, Graphs]:
    small, large = Graphs(SMALL), Graphs(LARGE)
    for row in ROWS.values():
        row(small)  # what is read once in a process
    assert large.passed.reading
    assert large.world.members
    return small, large


@pytest.mark.parametrize("row", ROWS)
def test_four_times_the_nodes_are_no_more_than_four_times_the_work(row: str, sizes: tuple[Graphs, Graphs]) -> None:
    small, large = sizes
    counts = [calls(lambda graphs=graphs: ROWS[row](graphs)) for graphs in sizes]
    power = log(counts[1] / counts[0]) / log(large.nodes / small.nodes)
    assert power <= MOST, f"{counts} calls at {small.nodes} and {large.nodes} nodes: nodes to the power {power:.2f}"


def test_the_pass_takes_no_more_memory_than_one_and_a_half_copies_of_the_graph(sizes: tuple[Graphs, Graphs]) -> None:
    gm = sizes[1].fresh()
    with fake_world(0, RANKS), mock.patch.object(fx.GraphModule, "recompile"), peak() as inside:
        manual_overlap_bucketing(gm, sizes[1].entries)
    with peak() as copied:
        kept = copy.deepcopy(sizes[1].gm.graph)
    assert len(kept.nodes) == sizes[1].nodes
    assert inside[0] <= PEAK * copied[0]


def calls(work: Callable[[], object]) -> int:
    """Calls of Python functions, generators' steps among them, that ``work`` makes."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def peak() -> Iterator[list[int]]:
    """Most bytes that Python had allocated at once in the block."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
