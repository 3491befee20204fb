"""One sweep along compute, with a clock: launches what must start by now, and fills idle streams with reductions.

A launch that would start too late if it were not launched now is launched, as far as limits allow; a reduction is launched as
soon as it delays no other; a wait stands before the first that needs what it brings, or where the flight is over.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.auto.latest_starts import SPARE
from pytest_fxbucket.passes.auto.windows import Event, MovableCollective

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.headroom import Headroom
    from pytest_fxbucket.passes.auto.windows import Windows


@dataclass(slots=True)
class Sweep:
    """The state of one sweep."""

    windows: Windows
    times: Sequence[float]
    late: Sequence[float]
    room: Headroom
    live: list[int]
    """Bytes that live in each slot, by what has been decided so far, with all other flights as late as they can be."""
    host: float = 0.0
    compute: float = 0.0
    free: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    """Of what was launched, by number."""
    over: set[int] = field(default_factory=set)
    """What was waited for."""
    packed: set[int] = field(default_factory=set)
    ahead: float = 0.0
    """Seconds of packs, and of calls where the host computes, that ran before the slot in which :func:`ideal` counts them."""
    flying: dict[int, MovableCollective] = field(default_factory=dict)
    carried: int = 0
    """Bytes in flight."""
    holding: dict[int, MovableCollective] = field(default_factory=dict)
    """Flights whose input must live until their wait, by number: from their first slot until they are waited for."""
    bytes_held: int = 0
    """Bytes of that."""
    events: list[Event] = field(default_factory=list)

    queues: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By stream what could be launched, (when it must start, number), in order."""
    fills: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By stream the reductions among it, a heap of (first slot, number)."""
    to_come: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By stream what was not launched, (when it must start, number), in order."""

    def run(self) -> list[Event]:
        """Launches and waits, in order."""
        # In each slot, before its compute runs: flights that may start from here on become candidates; what can stand no later
        # is launched, and so is what pays now; what is due is waited for; reductions are ended while memory is short.
        released, launched, waited, packed = (_by_slot(self.windows, key) for key in ("low", "last", "high", "packed"))
        for one in sorted(self.windows.flights, key=lambda one: (self.late[one.number], one.number)):
            self.to_come.setdefault(one.stream, []).append((self.late[one.number], one.number))
        for slot in range(len(self.windows.anchors)):
            self._release(released.get(slot, ()))
            needed = launched.get(slot, ())
            self._launch_all(slot, needed)
            self._land(slot, [one for one in waited.get(slot, ()) if one.number not in self.over])
            self._make_room(slot)
            # From this slot on the ideal clock has counted these packs and calls, too.
            for one in packed.get(slot, ()):
                self._pack(one)
                self.ahead -= one.pack
            self.ahead -= self._called(needed, waited.get(slot, ()))
            self._compute(slot)
        return self.events

    def _release(self, ready: Sequence[MovableCollective]) -> None:
        for one in ready:
            if one.holds:
                self.holding[one.number] = one
                self.bytes_held += one.holds
            insort(self.queues.setdefault(one.stream, []), (self.late[one.number], one.number))
            # Launched early, it lets no more memory live, so it may fill any hole.
            if not one.grows:
                heappush(self.fills.setdefault(one.stream, []), (one.low, one.number))

    def _launch_all(self, slot: int, needed: Sequence[MovableCollective]) -> None:
        """Launch what is ``needed`` in this slot, what would be too late in the next, and what fills a hole."""
        for one in list(self.flying.values()):  # what reductions were sent is free when they have ended
            if not one.grows and self._has_ended(one):
                self._wait(one, slot)
        # First what need not wait for another flight, last what must: launches in between are not held up by that wait.
        for one in needed:
            if all(self.end.get(other, inf) <= self._now for other in one.needs):
                self._launch_needed(one, slot, forced=False)
        self._launch_early(slot)
        self._fill(slot)
        for one in needed:
            self._launch_needed(one, slot, forced=False)

    def _land(self, slot: int, due: Sequence[MovableCollective]) -> None:
        """Wait for what is ``due``."""
        for one in due:
            self._launch_needed(one, slot, forced=True)
        if self.windows.fills:
            self._fill_waits(slot, due)
        for one in sorted(due, key=lambda one: (self.end[one.number], one.number)):
            self._wait(one, slot, is_due=True)

    @property
    def _now(self) -> float:
        return max(self.host, self.compute)

    def _launch_early(self, slot: int) -> None:
        """Launch what would start too late behind this slot's compute."""
        # ``late`` is a time of the ideal clock, which counts work later that the sweep has done ``ahead`` of it.
        following = self.times[slot + 1] if slot + 1 < len(self.times) else inf
        for stream in sorted(self.queues):
            queue = self.queues[stream]
            while queue:
                late, number = queue[0]
                one = self.windows.flights[number]
                # It was launched since it was queued, because something needed it or to fill a hole.
                if number in self.end:
                    queue.pop(0)
                    continue
                if late >= following + self.ahead or not self._can(one, slot):
                    break
                queue.pop(0)
                self._launch(one, slot)

    def _fill(self, slot: int) -> None:
        """Launch reductions that end before any other must start on their stream."""
        # By how much the sweep is behind the ideal clock already: what must start may start so much later.
        slip = self._now - self.times[slot] - self.ahead
        for stream in sorted(self.fills):
            heap, others = self.fills[stream], self.to_come[stream]
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
                if self.windows.fills and one.pack and one.last > slot:
                    break  # it is to run where compute waits
                idle = self.free.get(stream, 0.0) <= self._now + self.windows.seconds[slot]
                if not idle or start + one.seconds > late + slip or not self._can(one, slot):
                    break
                heappop(heap)
                self._launch(one, slot)

    def _fill_waits(self, slot: int, due: Sequence[MovableCollective]) -> None:
        """Pack for reductions, and launch them, while compute would only wait for what is ``due``."""
        until = max((self.end.get(one.number, 0.0) for one in due), default=0.0)
        for stream in sorted(self.fills):
            heap = self.fills[stream]
            while heap and self._now < until:
                one = self.windows.flights[heap[0][1]]
                if one.number not in self.end:
                    # At least half of the pack is to run before ``until``.
                    if not self._can(one, slot) or self._now + one.pack > until + one.pack / 2:
                        break
                    self._launch(one, slot)
                heappop(heap)

    def _can(self, one: MovableCollective, slot: int) -> bool:
        """Whether ``one`` may be launched in ``slot`` already."""
        for needed in one.needs:
            if needed not in self.over and not self._has_ended(self.windows.flights[needed]):
                return False
        if not self._fits(one):
            return False
        # ``live`` counts a gather from its last slot on: only the slots before that get more.
        if one.grows and one.last > slot and self.room.peak < inf:
            return max(self.live[slot : one.last]) + self.bytes_held + one.grows <= self.room.peak
        return True

    def _fits(self, one: MovableCollective) -> bool:
        if self.carried + one.size > self.room.in_flight:
            return False
        return not one.is_gather or sum(other.is_gather for other in self.flying.values()) < self.room.gathers

    def _launch_needed(self, one: MovableCollective, slot: int, *, forced: bool) -> None:
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

    def _launch(self, one: MovableCollective, slot: int) -> None:
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
        if one.grows and self.room.peak < inf:
            for at in range(slot, one.last):
                self.live[at] += one.grows

    def _called(self, launched: Sequence[MovableCollective], waited: Sequence[MovableCollective]) -> float:
        """Seconds of compute that it takes to launch and to wait, where the host computes."""
        host = self.windows.machine.host
        if not self.windows.machine.blocking:
            return 0.0
        return sum(host[one.launch] for one in launched) + sum(host[wait] for one in waited for wait in one.waits)

    def _pack(self, one: MovableCollective) -> None:
        if one.number not in self.packed:
            self.compute = self._now + one.pack
            self.ahead += one.pack
        self.packed.add(one.number)

    def _wait(self, one: MovableCollective, slot: int, *, is_due: bool = False) -> None:
        if one.number in self.over or one.number not in self.end:
            return
        self.over.add(one.number)
        if self.flying.pop(one.number, None) is not None:
            self.carried -= one.size
        if self.holding.pop(one.number, None) is not None:
            self.bytes_held -= one.holds
        self.compute = max(self.compute, self.end[one.number])
        if self.windows.machine.blocking:
            self.host = max(self.host, self.end[one.number])
        self.ahead += self._called((), (one,))
        for wait in one.waits:
            self.host += self.windows.machine.host[wait]
            self.events.append(Event(slot, wait, is_due))

    def _has_ended(self, one: MovableCollective) -> bool:
        return self.end.get(one.number, inf) + SPARE * one.seconds <= self._now

    def _make_room(self, slot: int) -> None:
        """Launch reductions and wait for them, until no more lives than may: what they were sent is free then."""
        while self.holding and self.live[slot] + self.bytes_held > self.room.peak:
            # What flies comes first, the soonest to end before others; what is not launched yet (inf) comes last.
            one = min(self.holding.values(), key=lambda one: (self.end.get(one.number, inf), one.number))
            self._launch_needed(one, slot, forced=True)
            self._wait(one, slot)

    def _compute(self, slot: int) -> None:
        self.host += self.windows.host[slot]
        self.compute = max(self.host, self.compute) + self.windows.seconds[slot]
        if self.windows.machine.blocking:
            self.host = self.compute


def _by_slot(windows: Windows, key: str) -> dict[int, list[MovableCollective]]:
    found: dict[int, list[MovableCollective]] = {}
    for one in windows.flights:
        found.setdefault(getattr(one, key), []).append(one)
    return found


def lazy(windows: Windows) -> list[Event]:
    """Launches and waits that need the least memory, in order.

    A flight that takes more memory when it is launched early is launched and waited for as late as can be, any other at once.
    """
    found: list[tuple[int, int, int, int]] = []
    for one in windows.flights:
        slot = one.last if one.grows else min(one.low, one.last)
        # 0 for a launch and 1 for a wait: sorted, a launch comes before its own waits.
        found.append((slot, one.number, 0, one.launch))
        found += [(slot if not one.grows else one.high, one.number, 1, wait) for wait in one.waits]
    return [Event(slot, node, turn == 1) for slot, _, turn, node in sorted(found)]
