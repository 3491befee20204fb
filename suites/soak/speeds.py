"""The part of the soak that looks at `fxbucket compare`: it raises no alarm where nothing changed, and finds what did."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from suites.soak.speeds_project import Run, SpeedsProject

LIMIT_S = 60.0
"""for one run"""
BUDGET_S = 10.0
_TRIAL_UNITS = 100
TRIALS = 3
Say = Callable[[str], None]


def speeds(equal: int, slowed: int, seed: int, say: Say, budget_s: float = BUDGET_S, trials: int = TRIALS) -> Iterator[str]:
    """`equal` runs of a commit beside itself, `slowed` beside one whose step takes 10 % longer, and as many of 5 %; in the
    order that `seed` gives."""
    with tempfile.TemporaryDirectory() as name:
        project = SpeedsProject(Path(name) / "project")
        units = _calibrated(project, budget_s, trials, say)
        commits = {percent: project.commit(units * percent // 100) for percent in (0, 5, 10)}
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


def _calibrated(project: SpeedsProject, budget_s: float, count: int, say: Say) -> int:
    """Units of work that rank 1 does in the time of a step."""
    old, new = project.commit(0), project.commit(_TRIAL_UNITS)
    trials = [project.compare(old, new, budget_s) for _ in range(count)]
    step_s = sum(run.step_s[0] for run in trials) / count
    unit_s = sum(run.step_s[1] - run.step_s[0] for run in trials) / count / _TRIAL_UNITS
    assert unit_s > 0, f"more work takes no longer: {trials}"
    units = round(step_s / unit_s)
    say(f"speeds: a step takes {1e3 * step_s:.1f} ms, as {units} units of work of {1e6 * unit_s:.0f} us do")
    return units
