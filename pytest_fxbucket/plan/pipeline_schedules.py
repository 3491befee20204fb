"""Schedules of torch.distributed.pipelining as data: which rank has which stage, and what each demands. Imports no torch."""

from __future__ import annotations

from itertools import count
from typing import Literal

Holds = Literal["one", "several", "two"]
"""Stages on each rank. ``one`` is a single stage, ``several`` are equally many in a loop round the ranks, ``two`` are a V."""

SCHEDULES: dict[str, Holds] = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "several",
    "LoopedBFS": "several",
    "InterleavedZeroBubble": "several",
    "ZBVZeroBubble": "two",
    "DualPipeV": "two",
}
"""Schedules by the names that ``torch.distributed.pipelining.schedules.get_schedule_class`` takes."""

_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")


def rank_of_stage(schedule: str, stages: int, pp: int, stage: int) -> int:
    """The place along ``pp`` of the rank that has ``stage`` of ``stages``, both counted from 0."""
    if SCHEDULES[schedule] != "two":
        return stage % pp
    # There and back: four stages on two ranks are on 0, 1, 1, 0.
    return min(stage, stages - 1 - stage)


def fits_ranks(schedule: str, stages: int, pp: int) -> bool:
    """Whether ``stages`` can be on ``pp`` ranks under ``schedule``: each rank has equally many, as many as it allows."""
    holds = SCHEDULES[schedule]
    return stages == pp if holds == "one" else stages == 2 * pp if holds == "two" else stages % pp == 0


def fitting_ranks(schedule: str, stages: int) -> list[int]:
    """Every ``pp`` that ``stages`` can be on, ascending; empty where there is none."""
    return [pp for pp in range(1, stages + 1) if fits_ranks(schedule, stages, pp)]


def microbatches_problem(schedule: str, microbatches: int, stages: int, pp: int) -> str:
    """Why ``schedule`` cannot run ``microbatches``, and the nearest number that it can, as a clause; empty if it can."""
    if (why := _why_not(schedule, microbatches, stages, pp)) is None:
        return ""
    # It ends, since every multiple of ``pp`` from ``stages`` on can be run.
    tries = (near for away in count(1) for near in (microbatches + away, microbatches - away) if near > 0)
    return f"{why}; use {next(near for near in tries if _why_not(schedule, near, stages, pp) is None)}"


def _why_not(schedule: str, microbatches: int, stages: int, pp: int) -> str | None:
    if schedule in _AT_LEAST_STAGES and microbatches < stages:
        return f"takes at least as many as there are stages, {stages}"
    rounds = max(1, microbatches // pp)  # as torch's classes count their ``number_of_rounds``
    if schedule in _IN_ROUNDS and microbatches % rounds:
        return f"runs them in {rounds} rounds of {pp} or more, each of as many"
    return None
