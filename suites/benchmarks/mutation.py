"""Prints how many mutants the checks of ten kinds of plans find: ours, on our own fixtures. ``make bench``.

Of each plan every operator that has a place there is tried in turn; what survives is printed with its graph.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.mutate.judge import MutantSelection
from pytest_fxbucket.mutate.score import MutationScore, percent, survivor_lines
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

ROOT = Path(__file__).parents[2]
PLANS = (
    "llama",
    "adamw",
    "tp",
    "moe",
    "hybrid",
    "replicate",
    "uneven",
    "checkpoint",
    "buckets::deps",
    "pipeline",
    "scheduled",
    "override",
)


def main() -> None:
    """Print a row a plan, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--at-most", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pools = Pools()
    scores: list[MutationScore] = []
    print(f"{'plan':<16}{'places':>8}{'mutants':>9}{'found':>7}{'equivalent':>12}{'without golden':>16}{'seconds':>9}")
    try:
        for name in options.plans:
            scores.append(_scored(name, MutantSelection(seed=options.seed, at_most=options.at_most), pools))
    finally:
        pools.close()
    _print("all", MutationScore([one for score in scores for one in score.judged], sum(score.places for score in scores)), 0.0)


def _scored(name: str, asked: MutantSelection, pools: Pools) -> MutationScore:
    begin = time.monotonic()
    path, _, row = name.partition("::")
    plan, _ = find_plan(f"{ROOT}/fixtures/plans/{path}.toml" + (f"::{row}" if row else ""))
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(ROOT, ROOT / "golden", Path(folder))
        score = [MutationScore((), 0), *PlanRun(plan, settings, pools).mutated(asked)][-1]
    _print(name, score, time.monotonic() - begin)
    for one in score.of("survived"):
        print(*(f"    {line}" for line in (*survivor_lines(one), *one.diff)), sep="\n")
    for one in score.judged:
        if not one.without_golden and one.fate != "survived":
            by = ", ".join(one.found) or one.harmless or one.unmade
            harmless = f" ({one.harmless})" if one.found and one.harmless else ""
            print(f"    {one.fate} by {by}{harmless}: {one.mutant.name}")
    return score


def _print(name: str, score: MutationScore, seconds: float) -> None:
    alone, of = score.without_golden
    beside = f"{alone} of {of}"
    print(
        f"{name:<16}{score.places:>8}{len(score.counted_mutants):>9}{percent(score.share):>9}{len(score.of('equivalent')):>10}{beside:>16}"
        f"{seconds:>9.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
