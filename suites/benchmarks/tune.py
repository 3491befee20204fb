"""Prints what ``fxbucket tune`` costs on 126 Llama layers of a 405B shape on 4,096 ranks: each plan that it simulates, and all.

Seconds of this process, which has a core to itself at best. ``make bench``.
"""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.tune.score import PlanSimulator
from pytest_fxbucket.tune.search import SimulatedScore, search
from suites.benchmarks.simulator import PLAN

SECONDS, AIM_S = 110, 120


class Timed(PlanSimulator):
    """Prints a row for each plan."""

    def score(self, plan: Plan) -> SimulatedScore:
        """Simulate ``plan``."""
        begin = time.perf_counter()
        score = super().score(plan)
        print(f"{time.perf_counter() - begin:8.2f} s  step {1000 * score.seconds:,.3f} ms", flush=True)
        return score


def main() -> None:
    """Print one row a plan, with what was changed above it, and the sum."""
    begin = time.perf_counter()
    (plan,) = parse_plans(PLAN + '[cluster]\npreset = "h100-sxm"\n', Path(__file__).parents[2] / "p.toml")
    cluster = cluster_of(plan)
    assert cluster is not None
    scorer = Timed(plan, cluster, lambda _: None)
    found = search(plan, scorer, inf, lambda: SECONDS - (time.perf_counter() - begin), lambda said: print(said, flush=True))
    took, gain = time.perf_counter() - begin, 1 - found.score.seconds / found.first.seconds
    print(
        f"126 layers on {plan.world_size:,} ranks: {found.tried + 1} plans in {took:.0f} s, to stay under {AIM_S} s; ", end=""
    )
    print(f"the best takes {100 * gain:.2f} % less, by {'; '.join(one.says for one in found.changes) or 'nothing'}")


if __name__ == "__main__":
    main()
