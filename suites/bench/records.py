"""Records for tests: a small plan's, with samples that are drawn or given."""

from __future__ import annotations

import random
from typing import Any

from pytest_fxbucket.bench.record import Record

MACHINE = {"system": "Linux", "arch": "x86_64", "cpu": "AMD EPYC 9B14", "cores": 2, "gpus": []}
WORKLOAD = {
    "model": {"factory": "tiny:build", "args": {"layers": 2}},
    "graph": None,
    "parallel": {"dp_shard": 2, "mode": "simple_fsdp"},
    "step": {"microbatches": 1},
    "optimizer": [],
    "world": {"dp_shard": 2},
}


def bucket(label: str, exposed_s: float | None = 0.001, direction: str = "forward") -> dict[str, Any]:
    return {"label": label, "direction": direction, "bytes": 4096, "exposed_s": exposed_s, "in_flight_s": 0.002}


def graph(*buckets: dict[str, Any]) -> dict[str, Any]:
    return {"digest": "ab12", "launches": 4, "bytes": 4096, "peak_bytes": [1 << 20, 1 << 20], "buckets": list(buckets)}


def steps(mean_s: float, seed: int, sets: int = 3, rounds: int = 60, spread: float = 0.01) -> tuple[tuple[float, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(mean_s * draw.lognormvariate(0, spread) for _ in range(rounds)) for _ in range(sets))


def fields(bucketed_s: float = 0.010, unbucketed_s: float = 0.015, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """What a record's JSON holds."""
    graphs = {"bucketed": graph(bucket("all_gather blocks")), "unbucketed": graph(bucket("all_gather blocks.0"))}
    return {
        "format": 1,
        "plan": "plans/tiny.toml",
        "row": None,
        "workload": WORKLOAD,
        "commit": "1" * 40,
        "dirty": False,
        "machine": MACHINE,
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "backend": "gloo",
        "ranks": 2,
        "pass": "manual",
        "time": "2026-11-21T23:00:00+00:00",
        "samples": {
            "bucketed": [list(each) for each in steps(bucketed_s, 2 * seed)],
            "unbucketed": [list(each) for each in steps(unbucketed_s, 2 * seed + 1)],
        },
        "warmup_rounds": [3, 3, 3],
        "is_stable": True,
        "has_priority": False,
        "capture_s": 1.2,
        "pass_s": 0.3,
        "graphs": graphs,
        **changed,
    }


def record(bucketed_s: float = 0.010, unbucketed_s: float = 0.015, seed: int = 0, **changed: Any) -> Record:
    return Record.from_dict(fields(bucketed_s, unbucketed_s, seed, **changed), "a record of the test's own")
