"""Exposed time is what waits blocked: of the slowest rank, in the median step."""

from __future__ import annotations

import pytest

from pytest_fxbucket.bench.measure import bucket_rows
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.spans import Exposed, exposed, middle_step
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member


def waited(rank: int, launch_ns: int, wait_ns: int, end_ns: int, bucket: int = 0) -> tuple[Span, ...]:
    label = f"all_gather layers.{bucket}"
    return (
        Span(rank, "compute", "launch", label, "forward", launch_ns, launch_ns + 1, bucket),
        Span(rank, "compute", "compute", "layers.0", "forward", launch_ns + 1, wait_ns),
        Span(rank, "compute", "wait", label, "forward", wait_ns, end_ns, bucket),
        Span(rank, "communication", "flight", label, "forward", launch_ns, end_ns, bucket),
    )


def test_the_slowest_rank_of_each_step_and_the_median_of_steps() -> None:
    fast = [waited(0, 0, 10, 20), waited(0, 0, 10, 40), waited(0, 0, 10, 11)]
    slow = [waited(1, 5, 10, 110), waited(1, 5, 10, 12), waited(1, 5, 10, 1010)]
    assert exposed([fast, slow]) == {0: Exposed(pytest.approx(100e-9), pytest.approx(105e-9))}


def test_waits_of_one_bucket_add_up_on_a_rank_and_not_over_ranks() -> None:
    twice = (*waited(0, 0, 10, 20), Span(0, "compute", "wait", "all_gather layers.0", "forward", 30, 35, 0))
    assert exposed([[twice], [waited(1, 0, 10, 21)]])[0].exposed_s == pytest.approx(15e-9)


def test_what_nobody_waits_for_is_not_exposed() -> None:
    launch = Span(0, "compute", "launch", "all_gather layers.0", "forward", 3, 4, 7)
    assert exposed([[(launch,)]]) == {7: Exposed(0.0, 0.0)}


def test_waits_for_another_graphs_launches_belong_to_no_bucket() -> None:
    wait = Span(0, "compute", "wait", "what another graph launched", "backward", 3, 4)
    assert exposed([[(wait,)]]) == {}


def test_no_steps_say_nothing() -> None:
    assert exposed([]) == {}
    assert middle_step([]) == middle_step([[], []]) == ()


def test_the_step_that_is_drawn_is_the_median_one_of_all_ranks() -> None:
    first = [waited(0, 0, 10, length) for length in (90, 20, 50)]
    second = [waited(1, 0, 10, length) for length in (15, 15, 15)]
    drawn = middle_step([first, second])
    assert max(span.end_ns for span in drawn) == 50
    assert {span.rank for span in drawn} == {0, 1}
    assert max(span.end_ns for span in middle_step([first[:2]])) == 20


def bucket(fqn: str, size: int) -> Bucket:
    return Bucket(
        kind="all_gather", op="", group="0", dtype=None, numel=size, bytes=size, parts=2,
        members=(Member(fqn, 0, size // 2, 23),), direction="forward", launch=0, wait=1, first_use=None, backward_use=None,
        node="gather",
    )  # fmt: skip


def test_rows_are_launches_in_order_named_by_entry_or_unbucketed_by_parameter() -> None:
    reading = GraphAnalysis((bucket("layers.0.w", 8), bucket("layers.0.b", 4)), (), (), 9)
    steps = [[waited(0, 0, 10, 20, bucket=1)]]
    entries = {"layers.0.w": "layers.0", "layers.0.b": "layers.0"}
    rows = bucket_rows(reading, entries, "bucketed", steps)
    assert [(row["label"], row["direction"], row["bytes"]) for row in rows] == [
        ("all_gather layers.0", "forward", 8), ("all_gather layers.0 #2", "forward", 4),
    ]  # fmt: skip
    assert [row["exposed_s"] for row in rows] == [0.0, pytest.approx(10e-9)]
    assert [row["in_flight_s"] for row in rows] == [0.0, pytest.approx(20e-9)]
    assert [row["label"] for row in bucket_rows(reading, entries, "unbucketed", steps)] == [
        "all_gather layers.0.w", "all_gather layers.0.b",
    ]  # fmt: skip
