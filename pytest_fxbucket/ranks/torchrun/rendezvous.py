"""Agreement among pytest processes that torchrun started: each says something, rank 0 puts it together, all read the same.

Who waits looks at the others too: who has ended, who is gone, who is ahead and will not come. So nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.launch import is_ready
from pytest_fxbucket.ranks.torchrun.member import END, HELLO, LEFT, Member, machine
from pytest_fxbucket.ranks.torchrun.store import Store, StoreLost

PATIENCE_S = 600.0
"""How long the slowest process may be behind where nothing else sets a limit."""
GONE = "is gone: "
"""The beginning of a reason for silence if the process is gone."""
_START_LIMIT_S = 120.0
_SILENCE_S = 30.0
_BEAT_S = 1.0
_ENDED = "its process has ended"
_SHORTEST_S, _LONGEST_S = 0.001, 0.05
_LOOK_S = 0.1
# How long the others wait for rank 0 after the limit: it waits for the limit itself before it says who is late.
_ANSWER_S = 3.0


class RendezvousLost(RankError):
    """The processes cannot go on together; the text names who is gone."""


@dataclass(frozen=True, slots=True)
class RendezvousRound:
    """What all processes said: a value for each rank, and for each rank that said nothing the reason."""

    entries: dict[int, object]
    missing: dict[int, str]


@dataclass(slots=True)
class _Beats:
    """When each process gave its last sign of life, by this process's clock."""

    last_signs: dict[int, tuple[str, float]] = field(default_factory=dict)
    looked_at: float = 0.0

    def is_due(self) -> bool:
        """Once every beat is often enough."""
        now = time.monotonic()
        if now - self.looked_at < _BEAT_S:
            return False
        self.looked_at = now
        return True

    def silent_s(self, rank: int, beat: str) -> float:
        """For how long ``rank`` has not gone on from ``beat``."""
        last, at = self.last_signs.get(rank, ("", 0.0))
        if last != beat:
            at = time.monotonic()
            self.last_signs[rank] = (beat, at)
        return time.monotonic() - at


class Rendezvous:
    """The meeting of all ``member.world`` processes, from the first word on. Raises RankError if they do not come together."""

    def __init__(self, member: Member) -> None:
        self.member, self.rank, self.world = member, member.rank, member.world
        self.over = ""
        """Why this process must end, if it must; then nothing waits any more, and ``exchange`` raises RendezvousLost."""
        self.gone: dict[int, str] = {}
        """Who has died, as far as this process knows, and how that was seen."""
        self.was_left = False
        """Whether somebody did not come to a job of ranks: its own failure comes before ours. Reset by who reads it."""
        self._nodes: dict[int, int] = {}
        self._neighbours: dict[int, int] = {}  # rank -> pidfd
        self._leavers = 0
        self._beats = _Beats()
        self._said: list[str] = []
        self._stopped = threading.Event()
        self._store = Store(member, is_server=member.serves_store)
        self._store.note(f"at/{self.rank}", "")
        # With a connection of its own: a call of the other one that takes long must not hold up the signs of life.
        threading.Thread(target=self._beat, args=(Store(member),), daemon=True).start()
        self.is_on_one_machine = self._meet()

    def who(self, rank: int) -> str:
        """``rank 3``, with its node where there are several."""
        return f"rank {rank} (node {self._nodes[rank]})" if self.member.nodes > 1 and rank in self._nodes else f"rank {rank}"

    @property
    def store_prefix(self) -> str:
        """Where keys of this run begin in torchrun's store."""
        return self._store.prefix

    def exchange(self, topic: str, value: object, *, limit_s: float, note: str = "") -> RendezvousRound:
        """What each process says at ``topic``; the same for all. Waits up to ``limit_s`` seconds for those that are late.

        Topics must grow from call to call, as strings go; who is at a larger one already will not come, and ``note`` tells
        those who wait at a smaller one why. Raises RendezvousLost.
        """
        self._go_on(topic, note)
        self._store.put(f"{topic}/{self.rank}", value)
        if self.rank == 0:
            return self._preside(topic, limit_s)
        self._store.count(f"{topic}/said", 1)
        return self._follow(topic, limit_s)

    def alarm(self, topic: str) -> None:
        """Let those who are at work for ``topic`` know that this process has failed at it."""
        if not self.over:
            self._store.count(f"{topic}/failed", 1)

    def is_alarmed(self, topic: str) -> bool:
        """Whether somebody has failed at ``topic``, or is gone."""
        if self.over:
            return True
        self.look()
        return bool(self.gone) or self._store.count(f"{topic}/failed") > 0

    def look(self) -> None:
        """Learn who is gone, and tell."""
        for rank in [rank for rank, pidfd in self._neighbours.items() if is_ready(pidfd)]:
            os.close(self._neighbours.pop(rank))
            if not self._position(rank).startswith(END):
                self._tell_gone(rank, _ENDED)
        leavers = self._store.count("leavers")
        while self._leavers < leavers and self._store.has(f"leaver/{self._leavers + 1}"):
            self._leavers += 1
            number, _, why = self._store.notes([f"leaver/{self._leavers}"])[0].partition(" ")
            self.gone.setdefault(int(number), why)
        if self._beats.is_due():
            self._listen()

    def gone_text(self) -> str:
        """A sentence that names who is gone; "" if nobody is. Asks the kernel only, so a signal handler may call it."""
        self.gone |= {rank: _ENDED for rank, pidfd in self._neighbours.items() if is_ready(pidfd)}
        return "; ".join(f"{self.who(rank)} {GONE}{why}" for rank, why in sorted(self.gone.items()))

    def end(self, why: str) -> None:
        """Let nothing in this process wait any more."""
        self.over = self.over or why

    def leave(self, note: str) -> None:
        """Note in the store, if it still answers, that this process will come to no topic any more, and who is gone.

        ``note`` gives the reason to those who wait for this process.
        """
        with contextlib.suppress(StoreLost):
            self.look()
            self._store.note(f"at/{self.rank}", f"{LEFT}\n{note}")

    def say_done(self) -> None:
        """Rank 0: the report is written, so all may go."""
        with contextlib.suppress(StoreLost):
            self._store.note("done", "")

    def await_done(self, limit_s: float) -> None:
        """Wait for rank 0's report: torchrun ends all processes as soon as the first has failed."""
        with contextlib.suppress(StoreLost):
            for is_time_to_look in _ticks(limit_s):
                if self._store.has("done"):
                    return
                if is_time_to_look:
                    self.look()
                if 0 in self.gone:
                    return

    def close(self) -> None:
        """Give no more signs of life; idempotent."""
        self._stopped.set()
        while self._neighbours:
            os.close(self._neighbours.popitem()[1])

    def _meet(self) -> bool:
        here = machine()
        try:
            hello = self.exchange(HELLO, (self.member.node, os.getpid(), here), limit_s=_START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        if hello.missing:
            self.close()
            late = ", ".join(f"rank {rank}" for rank in sorted(hello.missing))
            raise RankError(f"{late} of {self.world} did not start pytest-fxbucket within {_START_LIMIT_S:g} s; see its output")
        said: dict[int, tuple[int, int, tuple[str, str, str]]] = hello.entries  # type: ignore[assignment]  # as it is sent
        self._nodes = {rank: node for rank, (node, _, _) in said.items()}
        for rank, (_, pid, there) in said.items():
            if there == here and rank != self.rank:
                try:
                    self._neighbours[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._tell_gone(rank, _ENDED)
        # Loopback reaches all processes of one machine and network namespace, also where they do not share process ids.
        return all(there[:2] == here[:2] for _, _, there in said.values())

    # A round at a topic: each process notes where it is (``at/RANK``) and puts its value at ``TOPIC/RANK``; all but rank 0 then
    # count up ``TOPIC/said``. Rank 0 waits until that counter is full, or until it knows that the silent will not come, and
    # puts the values at ``TOPIC/all``. The others read that, so all have the same round, whatever each of them could see.

    def _go_on(self, topic: str, note: str) -> None:
        if self.over:
            raise RendezvousLost(self.over)
        self._store.note(f"at/{self.rank}", f"{topic}\n{note}")
        self._clean(topic)

    def _clean(self, topic: str) -> None:
        """Give the memory of old words back: at the third topic from now on nobody reads them any more."""
        self._said.append(topic)
        while len(self._said) > 3:
            old = self._said.pop(0)
            self._store.forget(f"{old}/{self.rank}")
            if self.rank == 0:
                self._store.forget(f"{old}/all")
                self._store.drop(f"{old}/said", f"{old}/failed")

    def _preside(self, topic: str, limit_s: float) -> RendezvousRound:
        excused: dict[int, str] = {}
        for is_time_to_look in _ticks(limit_s):
            if self.over:
                raise RendezvousLost(self.over)
            silent = self._silent(topic, in_detail=is_time_to_look)
            if is_time_to_look and silent:
                self.look()
                excused = self._excused(topic, silent)
            if not silent or len(excused) == len(silent):
                break
        silent = self._silent(topic)
        missing = {rank: excused.get(rank, f"did not come within {limit_s:g} s") for rank in silent}
        entries = {rank: self._store.get(f"{topic}/{rank}") for rank in range(self.world) if rank not in missing}
        round_ = RendezvousRound(entries, missing)
        self._store.put(f"{topic}/all", round_)
        return round_

    def _silent(self, topic: str, *, in_detail: bool = True) -> list[int]:
        """Ranks that have said nothing at ``topic`` yet; not in detail, by the counter alone, all but rank 0 or none."""
        others = range(1, self.world)
        if self._store.count(f"{topic}/said") == self.world - 1:
            return []
        return [rank for rank in others if not in_detail or not self._store.has(f"{topic}/{rank}")]

    def _excused(self, topic: str, silent: list[int]) -> dict[int, str]:
        """Ranks of the silent that will not come, and why."""
        found = {}
        for rank in silent:
            if rank in self.gone:
                found[rank] = GONE + self.gone[rank]
            elif why := self._passed(rank, topic):
                found[rank] = why
        return found

    def _follow(self, topic: str, limit_s: float) -> RendezvousRound:
        mine = {self.rank: self._store.get(f"{topic}/{self.rank}")}
        for is_time_to_look in _ticks(limit_s + _ANSWER_S):
            if self.over:
                raise RendezvousLost(self.over)
            if self._store.has(f"{topic}/all"):
                return cast(RendezvousRound, self._store.get(f"{topic}/all"))
            if not is_time_to_look:
                continue
            self.look()
            if 0 in self.gone:
                raise RendezvousLost(f"{self.who(0)} {GONE}{self.gone[0]}")
            # Rank 0 puts the round before it goes on, so only now it is sure that there is none.
            if (why := self._passed(0, topic)) and not self._store.has(f"{topic}/all"):
                return RendezvousRound(mine, {0: why})
        return RendezvousRound(mine, {0: f"did not answer within {limit_s:g} s"})

    def _passed(self, rank: int, topic: str) -> str:
        """Why ``rank`` will not come to ``topic``, if it is further on."""
        at, _, note = self._position(rank).partition("\n")
        if at <= topic:
            return ""
        return note or ("has ended" if at.startswith(END) else "went on without it")

    def _position(self, rank: int) -> str:
        key = f"at/{rank}"
        return self._store.notes([key])[0] if self._store.has(key) else ""

    def _tell_gone(self, rank: int, why: str) -> None:
        self.gone.setdefault(rank, why)
        # Counted first and noted then: who reads the counter in between waits for the note (see ``look``).
        number = self._store.count("leavers", 1)
        self._store.note(f"leaver/{number}", f"{rank} {why}")

    def _listen(self) -> None:
        """Find out who gives no signs of life: rank 0 listens to all of whom it has no pidfd, the others to rank 0."""
        others = range(1, self.world) if self.rank == 0 else (0,)
        ranks = [rank for rank in others if rank not in self._neighbours and rank not in self.gone]
        ranks = [rank for rank in ranks if self._store.has(f"beat/{rank}")]
        for rank, beat in zip(ranks, self._store.notes([f"beat/{rank}" for rank in ranks]), strict=True):
            if self._beats.silent_s(rank, beat) > _SILENCE_S and not self._position(rank).startswith(END):
                self._tell_gone(rank, f"no sign of life for {_SILENCE_S:g} s")

    def _beat(self, store: Store) -> None:
        number = 0
        with contextlib.suppress(StoreLost):
            while not self._stopped.wait(_BEAT_S if number else 0):
                number += 1
                store.note(f"beat/{self.rank}", str(number))


def _ticks(limit_s: float) -> Iterator[bool]:
    """Moments to ask, at first close together, until ``limit_s`` seconds are over; true where it is time for a longer look."""
    start = looked = time.monotonic()
    pause = _SHORTEST_S
    while (now := time.monotonic()) - start < limit_s:
        is_time_to_look = now - looked >= _LOOK_S
        looked = now if is_time_to_look else looked
        yield is_time_to_look
        time.sleep(pause)
        pause = min(_LONGEST_S, 1.5 * pause)
