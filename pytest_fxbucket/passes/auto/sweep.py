"""One sweep along compute: what must be launched by now is, what is off its path fills holes, waits stand where they must.

First backwards: when each collective must start at the latest so that nothing waits for it, all of a stream one behind the
other, those that are needed last at the end (W. S. Jewell's and J. R. Jackson's earliest due date first, mirrored). Then
forwards, with a clock: a launch that would start too late if it were not launched now is launched, as far as limits allow; a
reduction is launched as soon as it delays no other; a wait stands before the first that needs what it brings, or where the
flight is over.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.auto.windows import Event, Flight

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a sweep may take."""

    peak: float = inf
    """Bytes that live at most."""
    in_flight: float = inf
    """Bytes of collectives that are in flight at most, by their larger sides."""
    gathers: float = inf
    """All-gathers that are in flight at most."""


DRIFT = 8.0
"""How far a reduction may end behind the soonest that it could, in times of its own seconds."""
SPARE = 0.1
"""Share of its seconds by which each flight is to end earlier than it must, and is left alone longer than it should take."""


def ideal(windows: Windows) -> list[float]:
    """When compute would come to each slot, if nothing blocked it."""
    host = compute = 0.0
    packs, calls = [0.0] * len(windows.anchors), [0.0] * len(windows.anchors)
    machine = windows.machine
    for one in windows.flights:
        packs[one.packed] += one.pack
        calls[one.last] += machine.host[one.launch]
        calls[one.high] += sum(machine.host[wait] for wait in one.waits)
    found = []
    for slot in range(len(windows.anchors)):
        found.append(max(host, compute))
        host += calls[slot] + windows.host[slot]
        compute = max(host, compute) + packs[slot] if packs[slot] else compute
        compute = max(host, compute) + windows.seconds[slot]
        if machine.blocking:
            host = compute
    return found


@dataclass(frozen=True, slots=True)
class Latest:
    """Of each flight, by its number."""

    starts: list[float]
    """When it must start, all of a stream one behind the other."""
    deadlines: list[float]
    """When it must have ended."""


def latest(windows: Windows, times: Sequence[float], drift: float) -> Latest:
    """When each flight must start, and have ended, at the latest; ``times`` are those of :func:`ideal`.

    ``drift``: a reduction's flight may end so many times its seconds behind the soonest that it could.
    """
    flights = windows.flights
    deadline = [times[one.high] for one in flights]
    for one in flights:
        if not one.grows and one.low < len(times):
            soon = times[one.low] + (1 + drift) * one.seconds
            deadline[one.number] = min(deadline[one.number], max(soon, times[min(one.low + 1, len(times) - 1)]))
    readers = [0] * len(flights)
    for one in flights:
        for needed in one.needs:
            readers[needed] += 1
    heap: list[tuple[float, int]] = []
    for one in flights:
        if not readers[one.number]:
            heappush(heap, (-deadline[one.number], -one.number))
    found, begin = [0.0] * len(flights), dict[int, float]()
    while heap:
        flight = flights[-heappop(heap)[1]]
        end = min(deadline[flight.number], begin.get(flight.stream, inf))
        start = end - flight.seconds * (1 + SPARE)
        found[flight.number] = begin[flight.stream] = start
        for needed in flight.needs:
            deadline[needed] = min(deadline[needed], start)
            readers[needed] -= 1
            if not readers[needed]:
                heappush(heap, (-deadline[needed], -needed))
    return Latest(found, deadline)


@dataclass(slots=True)
class Sweep:
    """The state of one sweep."""

    windows: Windows
    times: Sequence[float]
    late: Sequence[float]
    room: Room
    live: list[int]
    """Bytes that live in each slot, of what has been decided and with all others as late as they can be."""
    host: float = 0.0
    compute: float = 0.0
    free: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    """Of what was launched, by number."""
    over: set[int] = field(default_factory=set)
    """What was waited for."""
    packed: set[int] = field(default_factory=set)
    ahead: float = 0.0
    """Seconds of packing, and of calls where the host computes, before the slot that :func:`ideal` has them in."""
    flying: dict[int, Flight] = field(default_factory=dict)
    carried: int = 0
    """Bytes in flight."""
    holding: dict[int, Flight] = field(default_factory=dict)
    """What was made to be reduced, by number, and was not waited for."""
    held: int = 0
    """Bytes of that."""
    events: list[Event] = field(default_factory=list)

    def run(self) -> list[Event]:
        """Launches and waits, in order."""
        windows = self.windows
        released, launch_at, wait_at, pack_at = (_by_slot(windows, key) for key in ("low", "last", "high", "packed"))
        queues: dict[int, list[tuple[float, int]]] = {}
        to_come = {stream: sorted(queue) for stream, queue in self._all().items()}
        fills: dict[int, list[tuple[int, int]]] = {}
        for slot in range(len(windows.anchors)):
            for one in released.get(slot, ()):
                if one.holds:
                    self.holding[one.number] = one
                    self.held += one.holds
                insort(queues.setdefault(one.stream, []), (self.late[one.number], one.number))
                if not one.grows:
                    heappush(fills.setdefault(one.stream, []), (one.low, one.number))
            needed = launch_at.get(slot, ())
            for one in needed:
                if all(self.end.get(other, inf) <= self._now for other in one.needs):
                    self._launch_needed(one, slot, forced=False)
            due = [one for one in wait_at.get(slot, ()) if one.number not in self.over]
            self._launch_early(slot, queues)
            self._fill(slot, fills, to_come)
            self._wait_for_ended(slot)
            for one in needed:
                self._launch_needed(one, slot, forced=False)
            for one in due:
                self._launch_needed(one, slot, forced=True)
                self._wait(one, slot, is_due=True)
            self._make_room(slot)
            for one in pack_at.get(slot, ()):
                self._pack(one)
                self.ahead -= one.pack
            self.ahead -= self._called(needed, wait_at.get(slot, ()))
            self._compute(slot)
        return self.events

    def _all(self) -> dict[int, list[tuple[float, int]]]:
        found: dict[int, list[tuple[float, int]]] = {}
        for one in self.windows.flights:
            found.setdefault(one.stream, []).append((self.late[one.number], one.number))
        return found

    @property
    def _now(self) -> float:
        return max(self.host, self.compute)

    def _launch_early(self, slot: int, queues: dict[int, list[tuple[float, int]]]) -> None:
        """Launch what would start too late behind this slot's compute."""
        following = self.times[slot + 1] if slot + 1 < len(self.times) else inf
        for stream in sorted(queues):
            queue = queues[stream]
            while queue:
                late, number = queue[0]
                one = self.windows.flights[number]
                if number in self.end:
                    queue.pop(0)
                    continue
                if late >= following + self.ahead or not self._can(one, slot):
                    break
                queue.pop(0)
                self._launch(one, slot)

    def _fill(self, slot: int, fills: dict[int, list[tuple[int, int]]], to_come: dict[int, list[tuple[float, int]]]) -> None:
        """Launch reductions that end before any other must start on their stream."""
        slip = self._now - self.times[slot] - self.ahead
        for stream in sorted(fills):
            heap, others = fills[stream], to_come[stream]
            while heap:
                number = heap[0][1]
                one = self.windows.flights[number]
                if number in self.end:
                    heappop(heap)
                    continue
                while others and others[0][1] in self.end:
                    others.pop(0)
                late = next((late for late, other in others[:3] if other != number and other not in self.end), inf)
                start = max(self._now + one.pack, self.free.get(stream, 0.0))
                idle = self.free.get(stream, 0.0) <= self._now + self.windows.seconds[slot]
                if not idle or start + one.seconds > late + slip or not self._can(one, slot):
                    break
                heappop(heap)
                self._launch(one, slot)

    def _can(self, one: Flight, slot: int) -> bool:
        """Whether ``one`` may be launched in ``slot`` already."""
        for needed in one.needs:
            if needed not in self.over and not self._has_ended(self.windows.flights[needed]):
                return False
        if not self._fits(one):
            return False
        if one.grows and one.last > slot:
            return max(self.live[slot : one.last]) + self.held + one.grows <= self.room.peak
        return True

    def _fits(self, one: Flight) -> bool:
        if self.carried + one.size > self.room.in_flight:
            return False
        return not one.is_gather or sum(other.is_gather for other in self.flying.values()) < self.room.gathers

    def _launch_needed(self, one: Flight, slot: int, *, forced: bool) -> None:
        """Launch ``one``, which can stand nowhere later, and what it needs; ``forced``: wait for others if it has no room."""
        if one.number in self.end:
            return
        for needed in one.needs:
            other = self.windows.flights[needed]
            self._launch_needed(other, slot, forced=True)
            self._wait(other, slot)
        if not self._fits(one):
            if not forced:
                return
            while self.flying and not self._fits(one):
                self._wait(min(self.flying.values(), key=lambda other: (self.end[other.number], other.number)), slot)
        self._launch(one, slot)

    def _launch(self, one: Flight, slot: int) -> None:
        for needed in one.needs:
            self._wait(self.windows.flights[needed], slot)
        self._pack(one)
        self.host += self.windows.machine.host[one.launch]
        self.ahead += self._called((one,), ())
        start = max(self._now, self.free.get(one.stream, 0.0))
        self.end[one.number] = self.free[one.stream] = start + one.seconds
        self.flying[one.number] = one
        self.carried += one.size
        self.events.append(Event(slot, one.launch))
        if one.grows:
            for at in range(slot, one.last):
                self.live[at] += one.grows

    def _called(self, launched: Sequence[Flight], waited: Sequence[Flight]) -> float:
        """Seconds of compute that it takes to launch and to wait, where the host computes."""
        host = self.windows.machine.host
        if not self.windows.machine.blocking:
            return 0.0
        return sum(host[one.launch] for one in launched) + sum(host[wait] for one in waited for wait in one.waits)

    def _pack(self, one: Flight) -> None:
        if one.number not in self.packed:
            self.compute = self._now + one.pack
            self.ahead += one.pack
        self.packed.add(one.number)

    def _wait(self, one: Flight, slot: int, *, is_due: bool = False) -> None:
        if one.number in self.over or one.number not in self.end:
            return
        self.over.add(one.number)
        if self.flying.pop(one.number, None) is not None:
            self.carried -= one.size
        if self.holding.pop(one.number, None) is not None:
            self.held -= one.holds
        self.compute = max(self.compute, self.end[one.number])
        if self.windows.machine.blocking:
            self.host = max(self.host, self.end[one.number])
        self.ahead += self._called((), (one,))
        for wait in one.waits:
            self.host += self.windows.machine.host[wait]
            self.events.append(Event(slot, wait, is_due))

    def _has_ended(self, one: Flight) -> bool:
        return self.end.get(one.number, inf) + SPARE * one.seconds <= self._now

    def _wait_for_ended(self, slot: int) -> None:
        """Wait for reductions that are there: what they were sent is free then."""
        for one in list(self.flying.values()):
            if not one.grows and self._has_ended(one):
                self._wait(one, slot)

    def _make_room(self, slot: int) -> None:
        """Launch reductions and wait for them as long as more lives than may."""
        while self.holding and self.live[slot] + self.held > self.room.peak:
            one = min(self.holding.values(), key=lambda one: (self.end.get(one.number, inf), one.number))
            self._launch_needed(one, slot, forced=True)
            self._wait(one, slot)

    def _compute(self, slot: int) -> None:
        self.host += self.windows.host[slot]
        self.compute = max(self.host, self.compute) + self.windows.seconds[slot]
        if self.windows.machine.blocking:
            self.host = self.compute


def _by_slot(windows: Windows, key: str) -> dict[int, list[Flight]]:
    found: dict[int, list[Flight]] = {}
    for one in windows.flights:
        found.setdefault(getattr(one, key), []).append(one)
    return found


def lazy(windows: Windows) -> list[Event]:
    """Everything as late as it can be, but for what takes no memory more: that is launched and waited for at once."""
    found: list[tuple[int, int, int, int]] = []
    for one in windows.flights:
        slot = one.last if one.grows else min(one.low, one.last)
        found.append((slot, one.number, 0, one.launch))
        found += [(slot if not one.grows else one.high, one.number, 1, wait) for wait in one.waits]
    return [Event(slot, node, turn == 1) for slot, _, turn, node in sorted(found)]
