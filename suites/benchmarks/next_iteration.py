"""Prints step time of work that crosses iterations, against the same step without that, and unbucketed; ``make bench``.

The second half of a Llama's layers, its norm and its output are reduced and updated in the next call (``next_iteration``).
All three take turns, step by step, in the same processes over plain gloo, in several sets of processes. A sample is the slowest
rank's time of a steady step: forward, backward and AdamW in float32. The ratio is that of the step that crosses iterations with
its 99 % interval (see `pytest_fxbucket.bench.stats`); below 1 it is faster. Behind
that both are simulated on the preset h100-sxm.

``python -m suites.benchmarks.next_iteration [--budget-s 40]``
"""

from __future__ import annotations

import argparse
import os

import torch

from pytest_fxbucket.bench.job import RankTimes
from pytest_fxbucket.bench.measure import tasks_of
from pytest_fxbucket.bench.stats import Pacing, Samples
from pytest_fxbucket.bench.step_time import worlds_of
from pytest_fxbucket.bench.timeline.marks import BUCKETED, IN_ONE_CALL, UNBUCKETED
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.simulate.of_plan import simulated_ranks
from suites.benchmarks.step_time import PLAN, ROOT, SETS, SIZES, Size, beside, median_ms

SIMULATED = ((8, Size(8, 1024)), (64, Size(8, 1024)), (64, Size(8, 2048)))
MOVED = """
[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.01, fused = true }}
groups = "entry"

[overlap]
updates = "ready"

[[transform]]
name = "next_iteration"
args = {{ entries = ["layers.[{half}-{last}]", "norm+output"] }}
"""


def main() -> None:
    """Print a row for each number of ranks and each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=40.0, help="seconds of samples for each row")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="how many of them, a table part each")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo; {SETS} sets of processes, {given.budget_s:g} s a row")
    print("| ranks | Llama | crossing iterations | in one call | unbucketed | rounds |")
    print("|---|---|---|---|---|---|")
    pools = Pools()
    try:
        for ranks in given.ranks:
            for size in SIZES:
                print(_row(pools, ranks, size, given.budget_s), flush=True)
    finally:
        pools.close()
    print("\n| ranks of h100-sxm, simulated | Llama | crossing iterations | exposed | in one call | exposed |")
    print("|---|---|---|---|---|---|")
    for ranks, size in SIMULATED:
        print(_simulated(ranks, size), flush=True)


def _simulated(ranks: int, size: Size) -> str:
    crossing = _world(ranks, size, '[cluster]\npreset = "h100-sxm"\n')
    cluster = cluster_of(crossing.plan)
    assert cluster is not None
    cells = [str(ranks), f"{size.layers} layers of {size.dim}"]
    for world in (crossing, worlds_of(crossing, Benchmark())[IN_ONE_CALL]):
        timeline = simulated_ranks(world, cluster, believed=True)[0].timeline
        cells += [f"{1e3 * timeline.seconds:.2f} ms", f"{1e3 * timeline.exposed:.2f} ms"]
    return f"| {' | '.join(cells)} |"


def _world(ranks: int, size: Size, more: str = "") -> PlanOnMesh:
    text = PLAN.format(ranks=ranks, **size._asdict()) + MOVED.format(half=size.layers // 2, last=size.layers - 1) + more
    (plan,) = parse_plans(text, ROOT / "plan.toml")
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def _row(pools: Pools, ranks: int, size: Size, budget_s: float) -> str:
    tasks = tasks_of(worlds_of(_world(ranks, size), Benchmark()), Pacing(budget_s / SETS, 0.0))
    firsts: list[RankTimes] = []
    for _ in range(SETS):
        pool = pools.get(ranks, "gloo:plain")
        found = pool.run("pytest_fxbucket.bench.job:run", tasks, timeout_s=600 + budget_s, paths=[str(ROOT)])
        firsts += [one for one in found[:1] if isinstance(one, RankTimes)]
        pool.close()
    samples: dict[str, Samples] = {name: tuple(tuple(one.samples[name]) for one in firsts) for name in firsts[0].samples}
    others = (beside(samples[BUCKETED], samples[name]) for name in (IN_ONE_CALL, UNBUCKETED))
    cells = [str(ranks), f"{size.layers} layers of {size.dim}", median_ms(samples[BUCKETED]), *others]
    return f"| {' | '.join(cells)} | {sum(map(len, samples[BUCKETED]))} |"


if __name__ == "__main__":
    main()
