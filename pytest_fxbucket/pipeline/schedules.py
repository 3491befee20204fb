"""Tables of schedules as plain data: made by torch's own classes, written as text, and the share of time that ranks idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.errors import text_of as error_text
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES, fits_ranks, microbatches_problem, rank_of_stage
from pytest_fxbucket.words import counted, nearest, one_or_other, show

if TYPE_CHECKING:
    from pytest_fxbucket.compat.pipelining import ScheduleStep

FORWARD, BACKWARD, INPUT_GRADS, WEIGHT_GRADS = "F", "B", "I", "W"
SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
TRANSFERS = SENDS + RECEIVES
GATHERS = ("UNSHARD", "RESHARD")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does, in torch's words."""

    rank: int
    kind: str
    """``F``, ``B`` (whole backward), ``I`` and ``W`` (gradients of inputs, of weights), ``SEND_F``, ``RECV_F``, ``SEND_B``,
    ``RECV_B``, ``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``, or ``OVERLAP_F_B``, which has ``parts``."""
    stage: int
    """The stage that acts; of ``OVERLAP_F_B`` the stage of the first part."""
    microbatch: int | None = None
    """None for an action that is done once for all microbatches."""
    parts: tuple[Action, ...] = ()
    batch: int | None = None
    """Number, on its rank, of the ``batch_isend_irecv`` that a send or receive is launched in; None if it is launched alone."""

    @property
    def token(self) -> str:
        """The action as torch writes it: ``0F3``, ``1SEND_B0``, ``2UNSHARD``; overlapped parts in parentheses."""
        if self.parts:
            return f"({' '.join(part.token for part in self.parts)})"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def __str__(self) -> str:
        if self.parts:
            return " with ".join(map(str, self.parts))
        return f"{self.kind} of stage {self.stage}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")


@dataclass(frozen=True, slots=True)
class Table:
    """What all ranks do."""

    schedule: str
    stages: int
    pp: int
    microbatches: int
    owners: tuple[int, ...]
    """The rank of each stage."""
    ranks: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in its order."""

    def peer(self, transfer: Action) -> int | None:
        """The rank that a send goes to, or a receive comes from; None if there is no stage at the other end."""
        other = transfer.stage + (1 if transfer.kind in ("SEND_F", "RECV_B") else -1)
        return self.owners[other] if 0 <= other < self.stages else None

    def partner(self, transfer: Action) -> tuple[str, int, int | None]:
        """Kind, stage and microbatch of the receive of a send, or of the send of a receive."""
        way = transfer.kind[-1]
        forward = 1 if way == "F" else -1
        if transfer.kind in SENDS:
            return f"RECV_{way}", transfer.stage + forward, transfer.microbatch
        return f"SEND_{way}", transfer.stage - forward, transfer.microbatch


def leaves(actions: tuple[Action, ...]) -> Iterator[Action]:
    """``actions``, with an overlapped action replaced by its parts."""
    for action in actions:
        yield from action.parts or (action,)


# Tables of torch's own schedules: made by torch's classes, written as text, and the share of time that ranks idle.


COSTS = {FORWARD: 1, BACKWARD: 2, INPUT_GRADS: 1, WEIGHT_GRADS: 1}
"""Time of each kind of action; the unit is the forward of one microbatch through one stage."""


def table_of(schedule: str, stages: int, pp: int, microbatches: int) -> Table:
    """What each of ``pp`` ranks does under torch's ``schedule``, by torch's own class; no process group is needed.

    Of GPipe and 1F1B it is what the class does when it runs, batches of transfers included. Raises :class:`StageError` for a
    schedule that torch does not have, and for numbers that it cannot take.
    """
    from pytest_fxbucket.compat import pipelining

    refuse_numbers(schedule, stages, pp, microbatches)
    try:
        orders, owners = pipelining.steps_of_ranks(schedule, stages, pp, microbatches)
    except (ValueError, AssertionError, IndexError, KeyError) as error:
        raise StageError(
            f"torch's {schedule} does not take {counted(stages, 'stage')} on {counted(pp, 'rank')} with "
            f"{counted(microbatches, 'microbatch')}: {error_text(error)}"
        ) from error
    ranks = tuple(tuple(_action(rank, step) for step in order) for rank, order in enumerate(orders))
    return Table(schedule, stages, pp, microbatches, tuple(owners[stage] for stage in range(stages)), ranks)


def owners_of(schedule: str, stages: int, pp: int, microbatches: int) -> tuple[int, ...]:
    """The rank of each stage. Raises :class:`StageError` as :func:`table_of`; imports no torch."""
    refuse_numbers(schedule, stages, pp, microbatches)
    return tuple(rank_of_stage(schedule, stages, pp, stage) for stage in range(stages))


def refuse_numbers(schedule: str, stages: int, pp: int, microbatches: int) -> None:
    """Raise :class:`StageError` for an unknown schedule, and for numbers that do not fit it. Imports no torch."""
    if schedule not in SCHEDULES:
        raise StageError(
            f"schedule {show(schedule)} is none of torch's, expected {one_or_other([*SCHEDULES])}"
            f"{nearest(schedule, [*SCHEDULES])}"
        )
    for number, noun in ((stages, "stages"), (pp, "ranks"), (microbatches, "microbatches")):
        if number < 1:
            raise StageError(f"{schedule} with {number} {noun} runs nothing, expected one or more")
    if not fits_ranks(schedule, stages, pp):
        wanted, expected = {
            "one": ("one stage on each rank", pp),
            "two": ("two stages on each rank", 2 * pp),
            "several": ("as many stages on each rank", pp * max(1, round(stages / pp))),
        }[SCHEDULES[schedule]]
        raise StageError(
            f"{schedule} runs {wanted}, but there are {counted(stages, 'stage')} on {counted(pp, 'rank')}; expected "
            f"{counted(expected, 'stage')}"
        )
    if problem := microbatches_problem(schedule, microbatches, stages, pp):
        raise StageError(f"{schedule} with {counted(microbatches, 'microbatch')}: it {problem}")


def _action(rank: int, step: ScheduleStep) -> Action:
    parts = tuple(_action(rank, part) for part in step.parts)
    return Action(rank, step.kind, step.stage, step.microbatch, parts, step.batch)


def text_of(table: Table) -> str:
    """A line for each rank, in torch's words: ``1F0`` is forward of stage 1, microbatch 0.

    Brackets are around what is launched as one batch, parentheses around what torch may overlap.
    """
    head = (
        f"{table.schedule}: {counted(table.stages, 'stage')} on {counted(table.pp, 'rank')}, "
        f"{counted(table.microbatches, 'microbatch')}"
    )
    return "\n".join([head, *(f"rank {rank}: {_line(actions)}" for rank, actions in enumerate(table.ranks))]) + "\n"


def _line(actions: Sequence[Action]) -> str:
    words = []
    for index, action in enumerate(actions):
        before, behind = (actions[i].batch if 0 <= i < len(actions) else None for i in (index - 1, index + 1))
        opens = "[" if action.batch is not None and action.batch != before else ""
        closes = "]" if action.batch is not None and action.batch != behind else ""
        words.append(f"{opens}{action.token}{closes}")
    return " ".join(words)
