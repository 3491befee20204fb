"""Prints step time of work that crosses iterations, against the same step without that, and unbucketed; ``make bench``.

The second half of a Llama's layers, its norm and its output are reduced and updated in the next call (``next_iteration``).
All three take turns, step by step, in the same processes over plain gloo, in several sets of processes. A sample is the slowest
rank's time of a steady step: forward, backward and AdamW in float32. The ratio is that of the step that crosses iterations with
its 99 % interval (see `pytest_fxbucket.bench.stats`); below 1 it is faster. Behind
that both are simulated on the preset h100-sxm.

``python -m suites.benchmarks.next_iteration [--budget-s 40]``
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.bench.measure import tasks_of
from pytest_fxbucket.bench.stats import Pacing
from pytest_fxbucket.bench.step_time import worlds_of
from pytest_fxbucket.bench.timeline.marks import IN_ONE_CALL, UNBUCKETED
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.simulate.of_plan import simulated_ranks
from suites.benchmarks.step_time import ROOT, SETS, Size, cells, print_table, row, sampled

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
    print_table(__doc__, ("crossing iterations", "in one call", "unbucketed", "rounds"), _row)
    print("\n| ranks of h100-sxm, simulated | Llama | crossing iterations | exposed | in one call | exposed |")
    print("|---|---|---|---|---|---|")
    for ranks, size in SIMULATED:
        print(_simulated(ranks, size), flush=True)


def _simulated(ranks: int, size: Size) -> str:
    crossing = _world(ranks, size, '[cluster]\npreset = "h100-sxm"\n')
    cluster = cluster_of(crossing.plan)
    assert cluster is not None
    found = [str(ranks), str(size)]
    for world in (crossing, worlds_of(crossing, Benchmark())[IN_ONE_CALL]):
        timeline = simulated_ranks(world, cluster, believed=True)[0].timeline
        found += [f"{1e3 * timeline.seconds:.2f} ms", f"{1e3 * timeline.exposed:.2f} ms"]
    return row(*found)


def _world(ranks: int, size: Size, more: str = "") -> PlanOnMesh:
    text = size.text(ranks) + MOVED.format(half=size.layers // 2, last=size.layers - 1) + more
    (plan,) = parse_plans(text, ROOT / "plan.toml")
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def _row(pools: Pools, ranks: int, size: Size, budget_s: float) -> Iterator[str]:
    tasks = tasks_of(worlds_of(_world(ranks, size), Benchmark()), Pacing(budget_s / SETS, 0.0))
    return cells(sampled(pools, "pytest_fxbucket.bench.job:run", tasks, budget_s), (IN_ONE_CALL, UNBUCKETED))


if __name__ == "__main__":
    main()
