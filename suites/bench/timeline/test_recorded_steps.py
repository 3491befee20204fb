"""Steps with clocks in their graphs, on real ranks: equal bits, and spans that hang together."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from torch import fx

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.bench.timeline.marks import ActivityMark, Span, marks_of
from pytest_fxbucket.bench.timeline.traced_steps import begins_of, with_clocks
from pytest_fxbucket.checks.bitwise.check import task_of
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import decode
from suites.bench.timeline.trace_jobs import Traced

RANKS, STEPS = 4, 2
Steps = tuple[tuple[Span, ...], ...]
Outcomes = list[tuple[dict[str, Steps], list[str]]]
"""Of each rank: spans of its steps by variant, and what clocks changed."""


@pytest.fixture(scope="module")
def marks(world: PlanOnMesh) -> dict[str, tuple[ActivityMark, ...]]:
    return {variant: marks_of(world, 0, "joint", variant) for variant in ("unbucketed", "bucketed")}


@pytest.fixture(scope="module")
def outcomes(world: PlanOnMesh, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    every = [
        {variant: marks_of(world, rank, "joint", variant) for variant in ("unbucketed", "bucketed")} for rank in range(RANKS)
    ]
    folder = Folder(tmp_path_factory.mktemp("log"), "small", "benchmark", None)
    payloads = [Traced(task_of(world, "joint", rank, "gloo"), every[rank]) for rank in range(RANKS)]
    log = folder.make()
    return pools.get(RANKS).run("suites.bench.timeline.trace_jobs:trace", payloads, timeout_s=60, log_dir=log)


def test_clocks_change_no_bit(outcomes: Outcomes) -> None:
    assert [different for _, different in outcomes] == [[]] * RANKS


@pytest.mark.parametrize("variant", ["unbucketed", "bucketed"])
def test_each_mark_is_a_span_of_each_step(outcomes: Outcomes, marks: dict[str, tuple[ActivityMark, ...]], variant: str) -> None:
    wanted = [(mark.kind, mark.label, mark.direction, mark.bucket) for mark in marks[variant]]
    for rank, (spans, _) in enumerate(outcomes):
        assert len(spans[variant]) == STEPS
        for step in spans[variant]:
            own = [span for span in step if span.stream == "compute"]
            assert [(span.kind, span.label, span.direction, span.bucket) for span in own] == wanted
            assert {span.rank for span in step} == {rank}


@pytest.mark.parametrize("variant", ["unbucketed", "bucketed"])
def test_a_ranks_own_spans_fill_the_step_without_gap(outcomes: Outcomes, variant: str) -> None:
    for spans, _ in outcomes:
        for step in spans[variant]:
            own = [span for span in step if span.stream == "compute"]
            assert all(before.end_ns == after.start_ns for before, after in pairwise(own))
            assert all(span.start_ns <= span.end_ns for span in step)


@pytest.mark.parametrize("variant", ["unbucketed", "bucketed"])
def test_flights_go_from_launch_to_the_end_of_the_wait(outcomes: Outcomes, variant: str) -> None:
    for spans, _ in outcomes:
        for step in spans[variant]:
            flights = {span.bucket: span for span in step if span.kind == "flight"}
            launches = {span.bucket: span for span in step if span.kind == "launch"}
            waits = {span.bucket: span for span in step if span.kind == "wait"}
            assert list(launches) == list(range(len(launches)))
            assert {b: (s.start_ns, s.end_ns) for b, s in flights.items()} == {
                b: (launches[b].start_ns, waits[b].end_ns) for b in launches
            }
            assert {span.stream for span in flights.values()} == {"communication"}


def test_a_step_begins_when_its_first_rank_does(outcomes: Outcomes) -> None:
    """One origin for all ranks of a machine: exactly the first of them starts at nought."""
    for variant in ("unbucketed", "bucketed"):
        for step in range(STEPS):
            starts = [min(span.start_ns for span in spans[variant][step]) for spans, _ in outcomes]
            assert min(starts) == 0


def test_only_ranks_of_one_machine_share_a_clock() -> None:
    everybody = [(1, 50, 90), (2, 7, 8), (1, 40, 95), (2, 6, 9)]
    assert begins_of(everybody[0], everybody) == [40, 90]
    assert begins_of(everybody[3], everybody) == [6, 8]


def test_ranks_of_one_collective_overlap_on_the_common_clock(outcomes: Outcomes) -> None:
    """No rank's wait for a gather ends before the last rank has begun to launch it: clocks that differ would show here."""
    for variant in ("unbucketed", "bucketed"):
        for step in range(STEPS):
            flights: dict[int, list[Span]] = {}
            for spans, _ in outcomes:
                for span in spans[variant][step]:
                    if span.kind == "flight":
                        flights.setdefault(span.bucket, []).append(span)
            for of_bucket in flights.values():
                assert max(span.start_ns for span in of_bucket) <= min(span.end_ns for span in of_bucket)


def test_a_graph_without_a_marked_node_is_refused() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(BenchmarkError, match=r"no node mm_1, at which compute layers\.0 begins; the rank runs another graph"):
        with_clocks(fx.GraphModule({}, graph), [ActivityMark("mm_1", "compute", "layers.0", "forward")], lambda _: None)


def test_marks_survive_the_way_to_a_rank(world: PlanOnMesh, marks: dict[str, tuple[ActivityMark, ...]]) -> None:
    for variant, portable in (
        ("unbucketed", world.unbucketed(0, "joint")),
        ("bucketed", world.passed(0)["joint"].portable),
    ):
        sent = pickle.loads(pickle.dumps(marks[variant]))
        assert sent == marks[variant]
        names = [node.name for node in decode(pickle.loads(pickle.dumps(portable))).graph.nodes]
        places = [names.index(mark.node) for mark in sent]
        assert places == sorted(set(places))
