"""The part of the soak that looks at `fxbucket compare`: it raises no alarm where nothing changed, and finds what did."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from suites.soak.speeds_project import Run, SpeedsProject

LIMIT_S = 60.0
"""for one run"""
BUDGET_S = 10.0
_TRIAL_UNITS = 300
TRIALS = 5
"""of each amount of work, to find out how much slows a step how far"""
Say = Callable[[str], None]


def speeds(
    equal: int,
    slowed: int,
    seed: int,
    say: Say,
    budget_s: float = BUDGET_S,
    units: Mapping[int, int] | None = None,
) -> Iterator[str]:
    """`equal` runs of a commit beside itself, `slowed` beside one whose step takes 10 % longer, and as many of 5 %; in the
    order that `seed` gives.

    `units` are those of work that rank 1 does more, by per cent; left out, they are measured first.
    """
    with tempfile.TemporaryDirectory() as name:
        project = SpeedsProject(Path(name) / "project")
        units = units or _calibrated(project, budget_s, say)
        commits = {percent: project.commit(units.get(percent, 0)) for percent in (0, 5, 10)}
        order = [0] * equal + [10] * slowed + [5] * slowed
        random.Random(seed).shuffle(order)
        found: dict[int, list[Run]] = {0: [], 5: [], 10: []}
        for percent in order:
            begin = time.monotonic()
            run = project.compare(commits[0], commits[percent], budget_s)
            taken_s = time.monotonic() - begin
            found[percent].append(run)
            say(f"speeds: {percent} % slowed, {run.verdict}, {100 * math.expm1(run.log_ratio):+.1f} %, {taken_s:.0f} s")
            if run.status == 2:
                yield f"a run with {percent} % came to no verdict: {run.verdict}"
            if taken_s > LIMIT_S:
                yield f"a run took {taken_s:.0f} s, where {LIMIT_S:g} s is meant to be the most"
    calm = sum(run.verdict == "same" for run in found[0])
    say(f"speeds: {calm} of {equal} runs of equal commits raised no alarm; seed {seed}")
    if calm < equal:
        yield f"{equal - calm} of {equal} runs of equal commits raised an alarm"
    for percent, share in ((10, 0.95), (5, 0.75)):
        seen = sum(run.verdict == "slower" for run in found[percent])
        say(f"speeds: {seen} of {slowed} steps slowed by {percent} % were found; seed {seed}")
        if seen < math.floor(share * slowed):
            yield f"{seen} of {slowed} steps slowed by {percent} % were found, where {math.floor(share * slowed)} must be"


def _calibrated(project: SpeedsProject, budget_s: float, say: Say) -> dict[int, int]:
    """Units of work that make a step 5 % and 10 % longer, by per cent.

    Little work is partly hidden, since rank 0 is at times the later one: what a unit of much work takes is a first guess,
    which is corrected by what the guess was seen to do.
    """
    step_s, much = _seen(project, _TRIAL_UNITS, budget_s)
    unit = math.expm1(much) / _TRIAL_UNITS
    assert unit > 0, f"{_TRIAL_UNITS} units of work take no longer than none"
    say(f"speeds: a step takes {1e3 * step_s:.1f} ms, and {100 * unit:.2f} % longer with a unit of much work")
    units = {}
    for percent in (5, 10):
        guess = round(percent / 100 / unit)
        seen = math.expm1(_seen(project, guess, budget_s)[1])
        units[percent] = guess + round((percent / 100 - seen) / unit)
        say(f"speeds: {guess} units make it {100 * seen:.1f} % longer; {units[percent]} are taken for {percent} %")
    return units


def _seen(project: SpeedsProject, units: int, budget_s: float) -> tuple[float, float]:
    """Step time without work, in seconds, and the logarithm of how much longer it is with `units` of it: means of trials."""
    old, new = project.commit(0), project.commit(units)
    trials = [project.compare(old, new, budget_s) for _ in range(TRIALS)]
    return sum(run.step_s[0] for run in trials) / TRIALS, sum(run.log_ratio for run in trials) / TRIALS
