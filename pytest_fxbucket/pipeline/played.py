"""Plays the table of a schedule: when each rank does each action, and the share of time that ranks idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.schedules import COSTS, FORWARD, WEIGHT_GRADS, Action, Table, leaves
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES

_Sent = tuple[int, int, int | None]
"""A value on its way: direction (1 or -1, see :func:`_way`), stage that it goes to, and microbatch."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action of a schedule. Times are seconds since the step began."""

    rank: int
    """The rank's place along pp."""
    kind: str
    stage: int
    microbatch: int | None
    start: float
    end: float


def bubble(table: Table) -> float:
    """The share of all ranks' time that they idle, from 0 to 1, with :data:`COSTS` and transfers that take no time.

    What torch may overlap runs in turn. Raises :class:`StageError` for a table in which something waits for ever.
    """
    done = done_by(table, lambda action: COSTS[action.kind], lambda sender, receiver: 0.0, [0.0] * table.pp)
    return sum(bubbles_of(done, table.pp)) / table.pp


def bubble_by_the_book(schedule: str, pp: int, microbatches: int) -> float | None:
    """The share that GPipe and 1F1B idle, ``(pp - 1) / (microbatches + pp - 1)``; None for all others, which idle less."""
    return (pp - 1) / (microbatches + pp - 1) if SCHEDULES[schedule] == "one" else None


def done_by(
    table: Table, takes: Callable[[Action], float], crosses: Callable[[int, int], float], begins: Sequence[float]
) -> list[TimedAction]:
    """When each rank does each action. ``takes`` gives the seconds of an action, ``crosses`` those from one stage to another.

    Rank r begins at ``begins[r]``. Actions that torch may overlap run one after the other. Raises :class:`StageError` for a
    table in which an action waits for ever.
    """
    # Each rank goes on with its own row until an action lacks its input; rounds over all ranks go on while any of them moves.
    # Times do not depend on the order of the visits, since a link's values come from one rank, in that rank's order.
    computes = [[one for one in leaves(actions) if one.kind in COSTS] for actions in table.ranks]
    done: list[list[TimedAction]] = [[] for _ in computes]
    clocks = list(begins)
    there: dict[_Sent, float] = {}
    links: dict[tuple[int, int], float] = {}  # by (sender, receiver): each direction of a link has its own queue
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(computes):
            while len(done[rank]) < len(own) and (ready := _ready(own[len(done[rank])], table, there)) is not None:
                action = own[len(done[rank])]
                start = max(clocks[rank], ready)
                clocks[rank] = end = start + takes(action)
                done[rank].append(TimedAction(rank, action.kind, action.stage, action.microbatch, start, end))
                _send(action, end, table, crosses, there, links)
                moved = True
    if stuck := [own[len(did)] for own, did in zip(computes, done, strict=True) if len(did) < len(own)]:
        raise StageError(f"{stuck[0]} on rank {stuck[0].rank} waits for ever, so the schedule has no end; see table_problems")
    return [one for own in done for one in own]


def bubbles_of(done: Sequence[TimedAction], ranks: int) -> tuple[float, ...]:
    """The share of the schedule's time in which each rank does none of its actions."""
    if not done:
        return (0.0,) * ranks
    begin, end = min(one.start for one in done), max(one.end for one in done)
    busy = [sum(one.end - one.start for one in done if one.rank == rank) for rank in range(ranks)]
    return tuple(1 - own / (end - begin) if end > begin else 0.0 for own in busy)


def _way(action: Action) -> int:
    """The direction of an action's result: 1 to the next stage, -1 to the one before, 0 if no other stage waits for it."""
    return {FORWARD: 1, WEIGHT_GRADS: 0}.get(action.kind, -1)


def _ready(action: Action, table: Table, there: Mapping[_Sent, float]) -> float | None:
    """When the input of ``action`` from another stage arrives; None if it was not sent yet, 0.0 if there is no such input.

    What it reads from its own rank is there by the rank's order.
    """
    way = _way(action)
    if not way or not 0 <= action.stage - way < table.stages:
        return 0.0
    return there.get((way, action.stage, action.microbatch))


def _send(
    action: Action,
    end: float,
    table: Table,
    crosses: Callable[[int, int], float],
    there: dict[_Sent, float],
    links: dict[tuple[int, int], float],
) -> None:
    """Note when the result of ``action`` arrives at the stage that reads it: a link carries one value after the other."""
    way = _way(action)
    other = action.stage + way
    if not way or not 0 <= other < table.stages:
        return
    # What crosses takes no link between two stages of one rank.
    arrives, pair = end, (table.owners[action.stage], table.owners[other])
    if seconds := crosses(action.stage, other):
        arrives = links[pair] = max(end, links.get(pair, 0.0)) + seconds
    there[way, other, action.microbatch] = arrives
