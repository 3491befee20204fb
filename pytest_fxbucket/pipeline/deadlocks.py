"""Ranks that wait for each other, found by playing a table: in-order channels between each pair of ranks, no values.

Two ways of sending are played. *Posted* is torch's: a transfer is launched, and waited for where its value is needed, at last
when the rank ends. Transfers between two ranks, of both directions, run in the order in which each of the two launches them, as
on a communicator of NCCL, but for those of one batch. *Blocking*: whoever sends or receives waits until the other end is there;
a batch is waited for as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

from pytest_fxbucket.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADS, SENDS, TRANSFERS, Action, Table
from pytest_fxbucket.words import some


def hang_of(table: Table) -> str | None:
    """A sentence on which ranks wait for each other for ever, for a table whose transfers match; None if all ranks end."""
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
    # Ranks on the way into a ring are left out. Without a ring the way ends at a rank that has ended.
    ring = seen[seen.index(rank) :] if rank in seen else seen
    each = [f"rank {one} at {played.waiting[one]} for rank {played.waits_for(one)}" for one in ring]
    return f"ranks wait for ever: {some(each, 4)}"


class _Played:
    """A table played to its end, or to where nothing moves."""

    def __init__(self, table: Table, *, blocking: bool) -> None:
        self.table, self.blocking = table, blocking
        self.waiting: dict[int, Action] = {}
        """For each rank that does not end the transfer that it waits for."""
        self._queues: dict[tuple[int, int], list[list[Action]]] = defaultdict(list)
        """By (rank, other rank) the launches that are not over, in order; each is the list of what is left of a batch."""
        self._open: dict[tuple[int, str, int, int | None], Action] = {}
        """Transfers that are launched and not over."""
        self._launches = [[list(group) for _, group in groupby(own, _launch(own))] for own in table.ranks]
        # For each rank the launch that it is at, and whether it has posted its transfers and waits for them.
        self._at = [0] * table.pp
        self._begun = [False] * table.pp
        # Ranks take turns, each as far as it gets: a list in any(), so that all have their turn. When none moves, each has
        # ended or waits for ever.
        moved = True
        while moved:
            moved = any([self._run(rank) for rank in range(table.pp)])
        for rank, launches in enumerate(self._launches):
            left = launches[self._at[rank]] if self._at[rank] < len(launches) else []
            # A rank that has run all its actions still waits for every transfer that it launched.
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
        """Transfers that ``action`` waits for and that are not over."""
        if action.kind in TRANSFERS:
            own = self._launches[action.rank][self._at[action.rank]]
            return [one for one in own if _key(one) in self._open] if self.blocking else []
        needs = [
            (part.rank, "RECV_F" if part.kind == FORWARD else "RECV_B", part.stage, part.microbatch)
            for part in action.parts or (action,)
            if part.kind in (FORWARD, BACKWARD, INPUT_GRADS)
        ]
        # A value of a stage on this rank is not received at all, so it is never open and not waited for.
        return [self._open[need] for need in needs if need in self._open]

    def _post(self, launch: list[Action]) -> None:
        peers = {action: self.table.peer(action) for action in launch}
        self._open.update((_key(action), action) for action in launch)
        for peer in sorted({peer for peer in peers.values() if peer is not None}):
            self._queues[launch[0].rank, peer].append([action for action in launch if peers[action] == peer])
            self._deliver(launch[0].rank, peer)

    def _deliver(self, one: int, other: int) -> None:
        """Let every transfer between two ranks pass that can."""
        # Only the first launch of each rank can pass, and of a batch its first send and its first receive. A send of one rank
        # passes with a receive of the other: what they carry matches, as the table was checked for that.
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
    """A key for ``groupby``: equal for neighbours that are launched in one batch, and for nothing else."""
    places = {id(action): index for index, action in enumerate(own)}
    return lambda action: ("alone", places[id(action)]) if action.batch is None else ("batch", action.batch)


def _key(action: Action) -> tuple[int, str, int, int | None]:
    return action.rank, action.kind, action.stage, action.microbatch
