"""Random models in pipeline stages on ranks, each held against its whole step."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.soak.random_models import plan_of

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("audit", "same", "collectives", "bitwise")


def pipelines(numbers: Sequence[int], say: Callable[[str], None]) -> Iterator[str]:
    """The models of `numbers` in stages; of each every check, bit for bit on 2 to 4 ranks."""
    equal = Counter[str]()
    pools = Pools()
    try:
        for done, number in enumerate(numbers, 1):
            plan = plan_of(number)
            how = f"{plan.pipeline.schedule}, {plan.stages} stages on {plan.parallel.pp} ranks" if plan.pipeline else ""
            try:
                lines = list(_problems(number, pools))
            except FxbucketError as error:
                lines = [f"{type(error).__name__}: {error}"]
            if lines:
                yield f"model {number} ({how}): {'; '.join(lines)}"
            elif plan.pipeline:
                equal[plan.pipeline.schedule] += 1
            if done % 10 == 0:
                say(f"pipelines: {done} of {len(numbers)}")
    finally:
        pools.close()
    each = ", ".join(f"{name} {times}" for name, times in sorted(equal.items()))
    say(f"pipelines: {equal.total()} of {len(numbers)} equal their whole step ({each})")


def _problems(number: int, pools: Pools) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        run = PlanRun(plan_of(number), RunSettings(rootdir=ROOT, golden_dir=ROOT / "golden", artifacts=Path(folder)), pools)
        for name in CHECKS:
            verdict = run.check(name)
            if verdict.outcome != "passed":
                yield f"{name} {verdict.outcome}: {verdict.summary} {' / '.join(verdict.lines[:6])}"
