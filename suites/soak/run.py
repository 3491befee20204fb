"""Runs ranks for long and kills them often, feeds garbage, compares step times, parts models into stages; ``make soak``.

What is well says `N of M`, and the seed that repeats the rest.

``python -m suites.soak.run --part 0.1``: a tenth of everything; ``--only graphs``: one part of it. Ends with 1 if anything was
not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from functools import partial

from suites.soak.allocations import allocations
from suites.soak.estimates import estimates
from suites.soak.garbage import garbage
from suites.soak.kills import kills
from suites.soak.parts import faults, graphs, items, scheduled, verdicts
from suites.soak.pipelines import pipelines
from suites.soak.speeds import speeds

ITEMS, VERDICTS, FAULTS, GRAPHS, KILLS, GARBAGE, PIPELINES = 1000, 200, 20, 2000, 50, 2000, 300
ESTIMATES = 200
EQUAL, SLOWED = 50, 20
"""runs of fxbucket compare"""
PARTS = (
    "items",
    "verdicts",
    "faults",
    "graphs",
    "scheduled",
    "kills",
    "garbage",
    "speeds",
    "pipelines",
    "allocations",
    "estimates",
)


def main() -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=float, default=1.0, help="how much of it, 0.1: a tenth")
    parser.add_argument("--seed", type=int, default=None, help="what is killed when, which graphs are drawn, and what garbage")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"soak: part {given.part:g}, seed {seed}, {os.cpu_count()} cores", flush=True)
    problems = soak(given.part, seed, [given.only] if given.only else PARTS)
    for problem in problems:
        print(f"NOT WELL: {problem}", flush=True)
    print(f"soak: {'all well' if not problems else f'{len(problems)} not well'}; seed {seed}", flush=True)
    return min(1, len(problems))


def soak(part: float, seed: int, names: Sequence[str]) -> list[str]:
    """What was not as it should be in `part` of everything that `names` says."""
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True)

    parts = {
        "items": partial(items, round(ITEMS * part), say),
        "verdicts": partial(verdicts, round(VERDICTS * part), say),
        "faults": partial(faults, round(FAULTS * part), seed, say),
        "graphs": partial(graphs, round(GRAPHS * part), seed, say),
        "scheduled": partial(scheduled, round(GRAPHS * part), seed, say),
        "kills": partial(kills, round(KILLS * part), seed, say),
        "garbage": partial(garbage, round(GARBAGE * part), seed, say),
        "speeds": partial(speeds, round(EQUAL * part), round(SLOWED * part), seed, say),
        "pipelines": partial(pipelines, range(seed * 10_000, seed * 10_000 + round(PIPELINES * part)), say),
        "allocations": partial(allocations, part, say),
        "estimates": partial(estimates, round(ESTIMATES * part), say),
    }
    return [problem for name in names for problem in parts[name]()]


if __name__ == "__main__":
    raise SystemExit(main())
