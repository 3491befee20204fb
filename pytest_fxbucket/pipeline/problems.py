"""Whether the table of a schedule can run: sends against receives, what needs what, and ranks that wait for each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest

from pytest_fxbucket.pipeline.schedules import (
    BACKWARD,
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
from pytest_fxbucket.words import some, times

_COMPUTES = (FORWARD, BACKWARD, INPUT_GRADS, WEIGHT_GRADS)


def table_problems(table: Table) -> tuple[str, ...]:
    """What is wrong with ``table``, a sentence each; nothing is run. Empty: it ends, on all ranks, and everything runs once.

    Looked for: stages on other ranks, forwards and backwards that do not run once, what runs before what it needs, sends and
    receives that do not match or match another value, and ranks that wait for each other.
    """
    found = [*_misplaced(table), *_not_once(table), *_too_early(table)]
    transfers = [*_unmatched(table)] or [*_crossed(table)]
    found += transfers
    if not transfers and (hang := hang_of(table)):  # else it would be said twice
        found.append(hang)
    return tuple(found)


def _misplaced(table: Table) -> Iterator[str]:
    """Actions of stages that another rank has, or that there are not."""
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
            forwards, whole, inputs, weights = (ran[kind, stage, microbatch] for kind in _COMPUTES)
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
        sharded = set(range(table.stages)) if gathers else set()
        reduced: set[int] = set()
        for action in leaves(actions):
            stage = action.stage
            if needed := _needed(action, table, done):
                yield f"rank {rank} has {action} before {needed}, which it needs"
            if action.kind in _COMPUTES and stage in sharded:
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
    """What ``action`` needs and is not ``done`` on its rank."""
    stage, microbatch = action.stage, action.microbatch

    def lacks(stage: int, *kinds: str) -> str | None:
        if any((kind, stage, microbatch) in done for kind in kinds):
            return None
        return str(Action(action.rank, kinds[0], stage, microbatch))

    def given(other: int, receive: str, *kinds: str) -> str | None:
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
    """Sends without a receive, and receives without a send, by (kind, stage, microbatch) on the rank of the other end."""
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
    """Values that would be taken for others: what one rank sends another arrives in the order in which it was sent."""
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


# Ranks that wait for each other, found by playing a table: in-order channels between each pair of ranks, no values.
#
# Two ways of sending are played. *Posted* is torch's: a transfer is launched, and waited for where its value is needed, at last
# when the rank ends. Transfers between two ranks, of both directions, run in the order in which each of the two launches them,
# as on a communicator of NCCL, but for those of one batch. *Blocking*: whoever sends or receives waits until the other end is
# there; a batch is waited for as a whole.


def hang_of(table: Table) -> str | None:
    """Who waits for whom for ever, in a sentence; of a table whose transfers match."""
    posted = _Played(table, blocking=False)
    if posted.waiting:
        return f"{_ring(posted)}, where transfers between two ranks run in the order in which each launches them"
    blocking = _Played(table, blocking=True)
    return f"{_ring(blocking)}, where a send waits until its receive is there" if blocking.waiting else None


def _ring(played: _Played) -> str:
    """The ranks that wait for each other, or for one that has ended."""
    rank, seen = min(played.waiting), list[int]()
    while rank in played.waiting and rank not in seen:
        seen.append(rank)
        rank = played.waits_for(rank)
    ring = seen[seen.index(rank) :] if rank in seen else seen
    each = [f"rank {one} at {played.waiting[one]} for rank {played.waits_for(one)}" for one in ring]
    return f"ranks wait for ever: {some(each, 4)}"


class _Played:
    """A table played to its end, or to where nothing moves."""

    def __init__(self, table: Table, *, blocking: bool) -> None:
        self.table, self.blocking = table, blocking
        self.waiting: dict[int, Action] = {}
        """What each rank that does not end waits at."""
        self._queues: dict[tuple[int, int], list[list[Action]]] = defaultdict(list)
        """Launches of a rank towards another that are not over, the first first."""
        self._open: dict[tuple[int, str, int, int | None], Action] = {}
        """Launched, and not over."""
        self._launches = [[list(group) for _, group in groupby(own, _launch(own))] for own in table.ranks]
        self._at = [0] * table.pp
        self._begun = [False] * table.pp
        moved = True
        while moved:
            moved = any([self._run(rank) for rank in range(table.pp)])
        for rank, launches in enumerate(self._launches):
            left = launches[self._at[rank]] if self._at[rank] < len(launches) else []
            pending = self._awaited(left[0]) if left else [one for one in self._open.values() if one.rank == rank]
            if pending:
                self.waiting[rank] = min(pending, key=table.ranks[rank].index)

    def waits_for(self, rank: int) -> int:
        """The rank at the other end of what ``rank`` waits at."""
        peer = self.table.peer(self.waiting[rank])
        assert peer is not None
        return peer

    def _run(self, rank: int) -> bool:
        """Let ``rank`` run on until it waits."""
        start = self._at[rank], self._begun[rank]
        launches = self._launches[rank]
        while self._at[rank] < len(launches):
            launch = launches[self._at[rank]]
            if launch[0].kind in TRANSFERS and not self._begun[rank]:
                self._post(launch)
                self._begun[rank] = True
            if self._awaited(launch[0]):
                break
            self._at[rank] += 1
            self._begun[rank] = False
        return (self._at[rank], self._begun[rank]) != start

    def _awaited(self, action: Action) -> list[Action]:
        """What is not over and ``action`` waits for."""
        if action.kind in TRANSFERS:
            own = self._launches[action.rank][self._at[action.rank]]
            return [one for one in own if _key(one) in self._open] if self.blocking else []
        needs = [
            (part.rank, "RECV_F" if part.kind == FORWARD else "RECV_B", part.stage, part.microbatch)
            for part in action.parts or (action,)
            if part.kind in (FORWARD, BACKWARD, INPUT_GRADS)
        ]
        return [self._open[need] for need in needs if need in self._open]

    def _post(self, launch: list[Action]) -> None:
        peers = {action: self.table.peer(action) for action in launch}
        self._open.update((_key(action), action) for action in launch)
        for peer in sorted({peer for peer in peers.values() if peer is not None}):
            self._queues[launch[0].rank, peer].append([action for action in launch if peers[action] == peer])
            self._deliver(launch[0].rank, peer)

    def _deliver(self, one: int, other: int) -> None:
        """Let all that can pass between two ranks pass."""
        queues = self._queues[one, other], self._queues[other, one]
        while all(queues):
            fronts = [{action.kind in SENDS: action for action in reversed(queue[0])} for queue in queues]
            pairs = [
                (fronts[0][way], fronts[1][not way]) for way in (True, False) if way in fronts[0] and (not way) in fronts[1]
            ]
            if not pairs:
                return
            for pair in pairs:
                for queue, action in zip(queues, pair, strict=True):
                    queue[0].remove(action)
                    self._open.pop(_key(action), None)
            for queue in queues:
                if not queue[0]:
                    queue.pop(0)


def _launch(own: tuple[Action, ...]) -> Callable[[Action], tuple[str, int]]:
    """A key that is equal for neighbours of one batch, and for nothing else."""
    places = {id(action): index for index, action in enumerate(own)}
    return lambda action: ("alone", places[id(action)]) if action.batch is None else ("batch", action.batch)


def _key(action: Action) -> tuple[int, str, int, int | None]:
    return action.rank, action.kind, action.stage, action.microbatch
