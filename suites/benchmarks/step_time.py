"""Prints step time, bucketed against unbucketed, torch's pass and FSDP2 eager; ``make bench``.

All four take turns, step by step, in the same processes over plain gloo, in several sets of processes; a sample is the slowest
rank's time of forward and backward in float32. Against each: the ratio of the bucketed step with its 99 % interval (see
`pytest_fxbucket.bench.stats`). FSDP2 runs eagerly, with the bucket plan's entries as its units.

``python -m suites.benchmarks.step_time [--budget-s 40]``
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pytest_fxbucket.bench.job import RankTimes
from pytest_fxbucket.bench.measure import tasks_of
from pytest_fxbucket.bench.stats import Pacing, Samples, ratio_of
from pytest_fxbucket.bench.step_time import worlds_of
from pytest_fxbucket.bench.timeline.marks import BUCKETED
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from suites.benchmarks.step_time_jobs import FSDP2, Beside
from suites.plans.llama import llama

ROOT = Path(__file__).resolve().parents[2]
SETS = 4
WARM = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""What the fork server imports once for all ranks."""


class Size(NamedTuple):
    """Of a Llama."""

    layers: int
    dim: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.dim}"

    def text(self, ranks: int) -> str:
        """A plan on so many ranks."""
        return llama(f"layers = {self.layers}, dim = {self.dim}", ranks)


SIZES = (Size(2, 64), Size(8, 64), Size(8, 256))
CellsOf = Callable[[Pools, int, Size, float], Iterable[str]]
"""From pools, ranks, a size and seconds of samples to the cells of a row."""


def main() -> None:
    """Print a row for each number of ranks and each model."""
    head = ("parameters", "bucketed", "unbucketed", "torch's pass", "FSDP2 eager", "rounds")
    print_table(__doc__, head, _row, WARM)


def print_table(about: str | None, head: Sequence[str], cells_of: CellsOf, warm: Sequence[str] = ()) -> None:
    """Print what ``cells_of`` gives of each number of ranks and each model, below ``head``; the command line says how long."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--budget-s", type=float, default=40.0, help="seconds of samples for each row")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="how many of them, a table part each")
    given = parser.parse_args()
    seconds = f"{given.budget_s:g} s a row"
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo, float32; {SETS} sets of processes, {seconds}")
    print(row("ranks", "Llama", *head))
    print("|---" * (len(head) + 2) + "|")
    pools = Pools(warm=warm)
    try:
        for ranks in given.ranks:
            for size in SIZES:
                print(row(str(ranks), str(size), *cells_of(pools, ranks, size, given.budget_s)), flush=True)
    finally:
        pools.close()


def row(*cells: str) -> str:
    """Of a table."""
    return f"| {' | '.join(cells)} |"


def _row(pools: Pools, ranks: int, size: Size, budget_s: float) -> Iterator[str]:
    (plan,) = parse_plans(size.text(ranks), ROOT / "plan.toml")
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
    tasks = tasks_of(worlds_of(world, Benchmark(against=("torch",))), Pacing(budget_s / SETS, 0.0))
    payload = _payload(world)
    beside_fsdp2 = [Beside(task, payload) for task in tasks]
    samples = sampled(pools, "suites.benchmarks.step_time_jobs:timed", beside_fsdp2, budget_s)
    parameters = sum(torch.Size(parameter.shape).numel() for parameter in world.step(0).parameters)
    yield f"{parameters / 1e6:.2f} M"
    yield from cells(samples, ("unbucketed", "torch", FSDP2))


def sampled(pools: Pools, job: str, tasks: Sequence[object], budget_s: float) -> dict[str, Samples]:
    """By variant the samples of all ranks together, in several sets of fresh processes."""
    firsts: list[RankTimes] = []
    for _ in range(SETS):
        pool = pools.get(len(tasks), "gloo:plain")
        found = pool.run(job, tasks, timeout_s=600 + budget_s, paths=[str(ROOT)])
        firsts += [one for one in found[:1] if isinstance(one, RankTimes)]
        pool.close()
    return {name: tuple(tuple(one.samples[name]) for one in firsts) for name in firsts[0].samples}


def cells(samples: Mapping[str, Samples], others: Iterable[str]) -> Iterator[str]:
    """The bucketed step, each of ``others`` beside it, and how many rounds there were."""
    yield median_ms(samples[BUCKETED])
    yield from (beside(samples[BUCKETED], samples[other]) for other in others)
    yield str(sum(map(len, samples[BUCKETED])))


def _payload(world: PlanOnMesh) -> dict[str, Any]:
    """What `fixtures.reference.by_torch.fsdp2` takes for the same step."""
    plan = world.plan
    assert plan.model is not None
    layers = [[f"layers.{number}"] for number in range(int(str(plan.model.args["layers"])))]
    return {
        "factory": plan.model.factory,
        "args": dict(plan.model.args),
        "batch": plan.model.batch,
        "loss": plan.model.loss,
        "seed": plan.run.seed,
        "mesh": {"dp_shard": world.size},
        "checkpoint": [],
        "units": [["tok_embeddings"], *layers, ["norm", "output"]],
        "param_dtype": None,
        "reduce_dtype": None,
        "reshard_after_forward": True,
    }


def beside(ours: Samples, theirs: Samples) -> str:
    """Median of ``theirs``, and the ratio of ``ours`` to them with its interval."""
    estimate = ratio_of(ours, theirs)
    low, high = (f"{value:.2f}" for value in (torch.tensor(estimate.low).exp(), torch.tensor(estimate.high).exp()))
    return f"{median_ms(theirs)}, x {estimate.ratio:.2f} ({low} to {high})"


def median_ms(samples: Samples) -> str:
    """Of all rounds."""
    return f"{1e3 * median(second for rounds in samples for second in rounds):.1f} ms"


if __name__ == "__main__":
    main()
