"""Prints what the simulator predicts of step time beside what is measured, on 2 ranks over gloo; ``make bench``.

Variants of one plan take turns, step by step, in the same processes: unbucketed, bucketed, prefetch 0 and 2, a cap, torch's
pass. The cost model is calibrated on every second step of the unbucketed one alone, and is then asked for all of them; measured
is the median of the other steps, of the slower rank.

``python -m suites.benchmarks.simulated_time [--rounds 60]``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

import torch

from pytest_fxbucket.bench.calibrated import stretches_of
from pytest_fxbucket.bench.measure import tasks_of
from pytest_fxbucket.bench.stats import Pacing
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, marks_of
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.simulate import cluster_named, simulate
from pytest_fxbucket.simulate.calibrate import CalibratedCluster, calibrate
from pytest_fxbucket.simulate.of_plan import bucketed_step
from pytest_fxbucket.step.roles import StepGraph
from suites.plans.llama import llama

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
DIFFERS = 0.1
"""Variants whose step times differ by more are to come in the right order."""


class Size(NamedTuple):
    """Of a Llama, and the cap of its variant with one."""

    layers: int
    dim: int
    cap_mb: float


SIZES = (Size(4, 64, 0.03), Size(4, 128, 0.1), Size(8, 256, 0.5))


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each variant")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {RANKS} ranks over gloo, float32; {given.rounds} rounds")
    pools = Pools()
    try:
        for size in SIZES:
            for line in _lines(pools, size, given.rounds):
                print(line, flush=True)
    finally:
        pools.close()


def _lines(pools: Pools, size: Size, rounds: int) -> Iterator[str]:
    worlds = worlds_of(size)
    tasks = tasks_of(worlds, Pacing(0.0, 0.0), 1)
    pool = pools.get(RANKS, "gloo:plain")
    job = "suites.benchmarks.simulated_time_jobs:clocked"
    found = pool.run(job, [(task, rounds) for task in tasks], timeout_s=1200, paths=[str(ROOT)])
    ranks = cast("list[dict[str, list[list[float]]]]", found)
    pool.close()
    ours = calibrated(worlds[UNBUCKETED], [one[UNBUCKETED][::2] for one in ranks])
    measured = {name: _slowest([one[name][1::2] for one in ranks]) for name in worlds}
    predicted = {name: simulate(step_of(name, world), ours.cluster).seconds for name, world in worlds.items()}
    yield f"\nLlama, {size.layers} layers of {size.dim}; {ours}\n"
    yield "| variant | measured | predicted | error |"
    yield "|---|---|---|---|"
    for name, seconds in measured.items():
        error = predicted[name] / seconds - 1
        yield f"| {name} | {seconds * 1e3:.1f} ms | {predicted[name] * 1e3:.1f} ms | {error:+.0%} |"
    differing = [(a, b) for a, b in combinations(worlds, 2) if abs(measured[a] / measured[b] - 1) > DIFFERS]
    wrong = [f"{a} and {b}" for a, b in differing if (measured[a] < measured[b]) != (predicted[a] < predicted[b])]
    yield f"\n{len(differing)} pairs differ by more than {DIFFERS:.0%}; not in order: {', '.join(wrong) or 'none'}"


def worlds_of(size: Size) -> dict[str, PlanOnMesh]:
    """The plan in all variants."""
    plain = _world(size)
    return {
        UNBUCKETED: plain,
        "bucketed": plain,
        "prefetch 0": _world(size, prefetch=0),
        "prefetch 2": _world(size, prefetch=2),
        f"cap of {size.cap_mb:g} MB": _world(size, cap_mb=size.cap_mb),
        "torch's pass": plain.by_pass("torch"),
    }


def _world(size: Size, prefetch: int = 1, cap_mb: float = 0) -> PlanOnMesh:
    text = llama(f"layers = {size.layers}, dim = {size.dim}", RANKS)
    (plan,) = parse_plans(f"{text}cap_mb = {cap_mb}\n[overlap]\nprefetch = {prefetch}\n", ROOT / "plan.toml")
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def step_of(name: str, world: PlanOnMesh) -> StepGraph:
    """The variant's step as rank 0 runs it."""
    if name == UNBUCKETED:
        return world.reference(0)
    return bucketed_step(world, 0)


def calibrated(world: PlanOnMesh, ranks: Sequence[Sequence[Sequence[float]]]) -> CalibratedCluster:
    """The cost model by what steps of the unbucketed variant took, by mark, on all ranks."""
    step = step_of(UNBUCKETED, world)
    (phase,) = step.graphs
    marks = marks_of(world, 0, phase, UNBUCKETED)
    stretches = stretches_of(phase, step.graphs[phase].graph, marks, [one for steps in ranks for one in steps])
    return calibrate(step, list(stretches), cluster_named("cpu-gloo", ROOT))


def _slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """The median over steps of the slower rank's seconds."""
    return median(max(map(sum, step)) for step in zip(*ranks, strict=True))


if __name__ == "__main__":
    main()
