"""Whether the table of a schedule can run: sends of all ranks against receives, and every action against what it needs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from pytest_fxbucket.pipeline.deadlocks import hang_of
from pytest_fxbucket.pipeline.schedules import (
    BACKWARD,
    COSTS,
    FORWARD,
    INPUT_GRADS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    WEIGHT_GRADS,
    Action,
    Table,
    leaves,
)
from pytest_fxbucket.words import times


def table_problems(table: Table) -> tuple[str, ...]:
    """What is wrong with ``table``, a sentence each; nothing is run. Empty: it ends on all ranks, and everything runs once.

    Looked for are actions of a stage that another rank has, forwards and backwards that do not run once, actions before what
    they need, sends and receives that do not match or match another value, and ranks that wait for each other.
    """
    found = [*_misplaced(table), *_not_once(table), *_too_early(table)]
    # Only where each send has its receive can be said which one is taken for which.
    transfers = [*_unmatched(table)] or [*_crossed(table)]
    found += transfers
    if not transfers and (hang := hang_of(table)):  # transfers that do not match would hang, and that is said already
        found.append(hang)
    return tuple(found)


def _misplaced(table: Table) -> Iterator[str]:
    """Actions of stages that are on another rank, or that do not exist."""
    for rank, actions in enumerate(table.ranks):
        for action in leaves(actions):
            if not 0 <= action.stage < table.stages:
                yield f"rank {rank} has {action}, but stages are 0 to {table.stages - 1}"
            elif table.owners[action.stage] != rank:
                yield f"rank {rank} has {action}, but stage {action.stage} is on rank {table.owners[action.stage]}"


def _not_once(table: Table) -> Iterator[str]:
    ran = Counter((one.kind, one.stage, one.microbatch) for actions in table.ranks for one in leaves(actions))
    for stage, rank in enumerate(table.owners):
        for microbatch in range(table.microbatches):
            # In the order of COSTS: F, B, I, W.
            forwards, whole, inputs, weights = (ran[kind, stage, microbatch] for kind in COSTS)
            where = f"on rank {rank} stage {stage}, microbatch {microbatch}"
            if forwards != 1:
                yield f"{where} runs forward {times(forwards)}, expected once"
            if whole + inputs != 1:
                yield f"{where} runs backward {times(whole + inputs)}, expected once"
            elif weights != inputs:
                beside = "once, since its input gradients are apart" if inputs else "never, since its backward is whole"
                yield f"{where} runs gradients of weights (W) {times(weights)}, expected {beside}"
        if (reduced := ran["REDUCE_GRAD", stage, None]) != 1:
            yield f"on rank {rank} stage {stage} reduces gradients {times(reduced)}, expected once"
    known = range(table.microbatches)
    for actions in table.ranks:
        for one in leaves(actions):
            if one.microbatch is not None and one.microbatch not in known:
                yield f"rank {one.rank} has {one}, but microbatches are 0 to {table.microbatches - 1}"


def _too_early(table: Table) -> Iterator[str]:
    gathers = any(one.kind == "UNSHARD" for actions in table.ranks for one in actions)
    for rank, actions in enumerate(table.ranks):
        done: set[tuple[str, int, int | None]] = set()
        # Tables of schedules with one stage a rank have no gathers, so nothing counts as sharded there.
        sharded = set(range(table.stages)) if gathers else set()
        reduced: set[int] = set()
        for action in leaves(actions):
            stage = action.stage
            if needed := _needed(action, table, done):
                yield f"rank {rank} has {action} before {needed}, which it needs"
            if action.kind in COSTS and stage in sharded:
                yield f"rank {rank} has {action} while the stage's parameters are not gathered"
            if action.kind in (BACKWARD, WEIGHT_GRADS) and stage in reduced:
                yield f"rank {rank} has {action} behind REDUCE_GRAD of stage {stage}, which would not have its gradients"
            if action.kind == "UNSHARD":
                sharded.discard(stage)
            elif action.kind == "RESHARD":
                sharded.add(stage)
            elif action.kind == "REDUCE_GRAD":
                reduced.add(stage)
            done.add((action.kind, stage, action.microbatch))


def _needed(action: Action, table: Table, done: set[tuple[str, int, int | None]]) -> str | None:
    """An action that ``action`` needs and that is not ``done`` on its rank; None if there is none."""
    stage, microbatch = action.stage, action.microbatch

    def lacks(stage: int, *kinds: str) -> str | None:
        if any((kind, stage, microbatch) in done for kind in kinds):
            return None
        return str(Action(action.rank, kinds[0], stage, microbatch))

    def given(other: int, receive: str, *kinds: str) -> str | None:
        # A value of a neighbour stage: computed here if that stage is on this rank, else received.
        if not 0 <= other < table.stages:
            return None
        here = table.owners[other] == action.rank
        return lacks(other, *kinds) if here else lacks(stage, receive)

    match action.kind:
        case "F":
            return given(stage - 1, "RECV_F", FORWARD)
        case "B" | "I":
            return lacks(stage, FORWARD) or given(stage + 1, "RECV_B", BACKWARD, INPUT_GRADS)
        case "W":
            return lacks(stage, INPUT_GRADS)
        case "SEND_F":
            return lacks(stage, FORWARD)
        case "SEND_B":
            return lacks(stage, BACKWARD, INPUT_GRADS)
    return None


def _unmatched(table: Table) -> Iterator[str]:
    """Sends without a receive and receives without a send: both ends must have as many of the same stage and microbatch."""
    there = Counter((a.rank, a.kind, a.stage, a.microbatch) for own in table.ranks for a in own if a.kind in TRANSFERS)
    for own in table.ranks:
        for action in own:
            if action.kind not in TRANSFERS:
                continue
            what, peer = f"rank {action.rank} has {action}", table.peer(action)
            if peer is None:
                yield f"{what}, but there is no stage at its other end"
                continue
            if peer == action.rank:
                yield f"{what}, whose other end is on the same rank"
                continue
            kind, stage, microbatch = table.partner(action)
            ends = there[action.rank, action.kind, action.stage, action.microbatch], there[peer, kind, stage, microbatch]
            if ends[0] != ends[1]:
                other = Action(peer, kind, stage, microbatch)
                yield f"{what} {times(ends[0])}, but rank {peer} has {other} {times(ends[1])}"


def _crossed(table: Table) -> Iterator[str]:
    """Values that would be taken for others: a rank receives what another one sends in the order in which it was sent."""
    # By (sender, receiver) the sends of the one and the receives of the other, each in the order of its rank.
    lanes: dict[tuple[int, int], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for own in table.ranks:
        for action in own:
            peer = table.peer(action) if action.kind in TRANSFERS else None
            if peer is not None and action.kind in SENDS:
                lanes[action.rank, peer][0].append(action)
            elif peer is not None and action.kind in RECEIVES:
                lanes[peer, action.rank][1].append(action)
    for (sender, receiver), (sends, receives) in sorted(lanes.items()):
        for number, (send, receive) in enumerate(zip_longest(sends, receives)):
            if send is None or receive is None or table.partner(send) != (receive.kind, receive.stage, receive.microbatch):
                yield (
                    f"transfer {number} from rank {sender} to rank {receiver} is {send} where it is sent, but {receive} where "
                    "it is received, and the receiver would take the one for the other"
                )
                break
