"""Estimates of a change in step time, of samples as a busy machine gives them: no false alarm, and none slept through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pytest_fxbucket.bench.stats import Samples, ratio_between, ratio_of
from suites.bench.noise import turns

THRESHOLD = 0.03
FOUND = {0.10: 1.0, 0.05: 0.92, -0.10: 1.0}
"""Changes, and the share of runs in which each must be found."""


def estimates(runs: int, say: Callable[[str], None]) -> Iterator[str]:
    """What is wrong in ``runs`` runs of the same code twice, and in as many of other kinds as these take."""
    same = [ratio_of(*turns(seed, 0.0)) for seed in range(runs)]
    alarms = sum(each.is_slower(THRESHOLD) or each.is_faster(THRESHOLD) for each in same)
    quiet = runs - alarms
    if alarms:
        yield f"estimates: {alarms} of {runs} runs of the same code raised an alarm"
    held = sum(each.low <= 0.0 <= each.high for each in same)
    if held < math.floor(0.98 * runs):  # where 0.99 is asked: fewer has a chance of 1 in 20
        yield f"estimates: {held} of {runs} intervals hold the truth"
    width = sum(each.half_width for each in same) / runs
    if width >= 0.025:
        yield f"estimates: intervals are {width:.3f} to each side, wider than they must"
    few = [ratio_of(*turns(seed, 0.05), confidence=0.5) for seed in range(runs // 2)]
    held = sum(each.low <= math.log(1.05) <= each.high for each in few)
    if not 0.35 * len(few) <= held <= 0.9 * len(few):
        yield f"estimates: {held} of {len(few)} intervals of one half hold the truth"
    for change, least in FOUND.items():
        several = [ratio_of(*turns(1000 + seed, change)) for seed in range(runs // 5)]
        found = sum(each.is_slower(THRESHOLD) if change > 0 else each.is_faster(THRESHOLD) for each in several)
        if found < math.floor(least * len(several)):
            yield f"estimates: {found} of {len(several)} changes by {change:+.0%} were found"
    for sets in (1, 2, 3):
        alarms = sum(ratio_of(*turns(seed, 0.0, sets=sets, rounds=60)).is_slower(THRESHOLD) for seed in range(runs * 3 // 10))
        missed = sum(not ratio_of(*turns(seed, 0.1, sets=sets, rounds=60)).is_slower(THRESHOLD) for seed in range(runs // 7))
        if alarms or missed:
            yield f"estimates: of {sets} sets of processes {alarms} raised an alarm, and {missed} missed a change"
    yield from _on_other_machines(runs * 3 // 10)
    alarms = sum(ratio_of(*turns(seed, 0.0, between=0.03)).is_slower(THRESHOLD) for seed in range(runs * 3 // 10))
    if alarms > 2:
        yield f"estimates: {alarms} alarms by processes that differ much"
    say(f"estimates: {quiet} of {runs} runs of the same code raise no alarm; intervals are {width:.4f} to each side")


def _on_other_machines(runs: int) -> Iterator[str]:
    """Two runs on machines of other speed are compared by their ratios."""
    alarms = 0
    for seed in range(runs):
        new, old = turns(2 * seed + 1, -0.3)
        alarms += ratio_between(turns(2 * seed, -0.3), (scaled(new, 1.7), scaled(old, 1.7))).is_slower(THRESHOLD)
    if alarms:
        yield f"estimates: {alarms} of {runs} runs on another machine raised an alarm"
    slower = [ratio_between(turns(2 * s, -0.3), turns(2 * s + 1, 0.7 * 1.1 - 1)).is_slower(THRESHOLD) for s in range(runs // 2)]
    if sum(slower) < math.floor(0.97 * len(slower)):
        yield f"estimates: {sum(slower)} of {len(slower)} slower runs on another machine were found"


def scaled(samples: Samples, factor: float) -> Samples:
    return tuple(tuple(factor * sample for sample in rounds) for rounds in samples)
