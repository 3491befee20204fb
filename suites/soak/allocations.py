"""Peaks of memory as the simulator has them, beside what ranks allocate, for every plan; see suites/simulate/allocations.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_fxbucket.checks.registry import ON_RANKS
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pools import Pools
from suites.simulate.allocations import peaks

PLANS = Path(__file__).resolve().parents[2] / "fixtures" / "plans"


def allocations(part: float, say: Callable[[str], None]) -> Iterator[str]:
    """All plans and rows that ranks run, here as one process, or the first ``part`` of each file's rows, at least one."""
    pools, looked, furthest = Pools(), 0, 0.0
    try:
        for path in sorted(PLANS.glob("*.toml")):
            plans = [plan for plan in load_plans(path) if any(getattr(plan.checks, check) for check in ON_RANKS)]
            for plan in plans[: max(1, round(len(plans) * part))]:
                for one in peaks(pools, plan):
                    looked, furthest = looked + 1, max(furthest, abs(one.said / one.counted - 1))
                    if one.parts:
                        row = f"[{plan.matrix_id}]" if plan.matrix_id else ""
                        yield f"{path.name}{row}: {one.graph} takes {one.counted:,} bytes, and {one.said:,} are said"
            say(f"allocations: {path.name}, {looked} graphs, the furthest {100 * furthest:.2f} % from what is counted")
    finally:
        pools.close()
