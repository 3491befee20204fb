"""Scores the checks of one plan: its mutants one after the other, until there are no more or the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.mutate.judge import Judge
from pytest_fxbucket.mutate.mutant import mutants_of
from pytest_fxbucket.mutate.registry import operators_of
from pytest_fxbucket.mutate.score import Judged, Score

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context


@dataclass(frozen=True, slots=True)
class Asked:
    """Which mutants are to be judged; plain data."""

    operators: tuple[str, ...] = ()
    """Their names; all of ours if there are none."""
    seed: int = 0
    at_most: int = 100
    seconds: float = inf
    """After which no more are made."""
    worker: int = 0
    workers: int = 1
    """Of so many each takes every so manieth mutant."""


def scored(context: Context, asked: Asked) -> Iterator[Score]:
    """The score so far, after each mutant of the plan that ``context`` is of.

    Raises FxbucketError for a plan that does not pass its own checks, UsageError for an operator that there is not.
    """
    end = time.monotonic() + asked.seconds
    operators = operators_of(asked.operators)
    judge = Judge(context)
    context.say("running the checks on the graph as it is")
    judge.refuse_red()
    mutants = mutants_of(context.run_world, operators, asked.seed)
    own = mutants[: asked.at_most][asked.worker :: asked.workers]
    judged: list[Judged] = []
    for number, mutant in enumerate(own, 1):
        if judged and time.monotonic() > end:
            break
        score = Score(judged, len(mutants))
        context.say(f"mutant {number} of {len(own)}, {mutant.name}; found {score.found} of {len(score.made)}")
        judged.append(judge.judged(mutant))
        yield Score(tuple(judged), len(mutants))
