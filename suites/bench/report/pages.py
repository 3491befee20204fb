"""Reports for tests: a plan with stored runs and a step of few spans, with names that HTML would take for its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_fxbucket.bench.report.page import ReportInput
from pytest_fxbucket.bench.timeline.marks import Span
from suites.bench.records import MACHINE, bucket, graph, record

EVIL = "</script><img src=x onerror=alert(1)>&amp;<b>"
OTHER_MACHINE = {**MACHINE, "cpu": "Intel Xeon 6960P", "cores": 8}


def step(ranks: int, scale: int = 1_000_000, module: str = "layers.0.attention", buckets: int = 2) -> tuple[Span, ...]:
    """Of each rank: a launch and a wait for each bucket, with compute of each direction between."""
    spans: list[Span] = []
    for rank in range(ranks):
        at = rank * 1000
        for number in range(buckets):
            direction = "forward" if number == 0 else "backward"
            label = f"all_gather layers.{number}"
            begin = at
            for kind, name, length in (
                ("launch", label, 1), ("compute", f"copy-in layers.{number}", 1), ("compute", module, 4), ("wait", label, 3),
                ("compute", "", 1),
            ):  # fmt: skip
                index = number if kind != "compute" else -1
                spans.append(Span(rank, "compute", kind, name, direction, at, at + length * scale, index))  # type: ignore[arg-type]  # literals
                at += length * scale
            spans.append(Span(rank, "communication", "flight", label, direction, begin, at - scale, number))
    return tuple(spans)


def given(ranks: int = 2, stored: Sequence[Any] = (), **changed: Any) -> ReportInput:
    graphs = {
        "bucketed": graph(bucket("all_gather layers.0", 0.003), bucket("all_gather layers.1", 0.004, "backward")),
        "unbucketed": graph(*(bucket(f"all_gather layers.{i}.w", 0.001 * i) for i in range(40))),
    }
    mine = record(0.0109, 0.0126, 9, **{"graphs": graphs, "commit": "f" * 40, **changed})
    spans = {"bucketed": step(ranks), "unbucketed": step(ranks, 2_000_000)}
    return ReportInput(mine, tuple(stored), spans)


def history(count: int, **changed: Any) -> list[Any]:
    """Stored runs, oldest first."""
    return [
        record(seed=seed, commit=f"{seed:09x}" + "0" * 31, time=f"2026-10-{seed % 28 + 1:02d}T10:00:00+00:00", **changed)
        for seed in range(1, count + 1)
    ]
