"""When each collective must start at the latest so that nothing waits for it.

Backwards along compute: all of a stream one behind the other, those that are needed last at the end (earliest due date first,
J. R. Jackson, 1955, mirrored).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.windows import MovableCollective, Windows

DRIFT = 8.0
"""How far a reduction may end behind the soonest that it could, in times of its own seconds."""
NEAR = 8
"""A gather may be unpacked at most so many blocking waits ahead of its first reader."""
SPARE = 0.1
"""Share of a flight's seconds: it is to end so much before it must, and counts as ended only so much after its estimate."""


def ideal(windows: Windows) -> list[float]:
    """When compute would be through with the waits of each slot, if each flight started as soon as it can, and alone."""
    # A bound from below: no flight queues behind another on its stream, so waits block only as long as they must.
    host = compute = 0.0
    arrives = [0.0] * len(windows.anchors)
    released: dict[int, list[MovableCollective]] = {}
    for one in windows.flights:
        released.setdefault(one.low, []).append(one)
    packs, calls = [0.0] * len(windows.anchors), [0.0] * len(windows.anchors)
    machine = windows.machine
    for one in windows.flights:
        packs[one.packed] += one.pack
        calls[one.last] += machine.host[one.launch]
        calls[one.high] += sum(machine.host[wait] for wait in one.waits)
    found = []
    for slot in range(len(windows.anchors)):
        for one in released.get(slot, ()):
            arrives[one.high] = max(arrives[one.high], max(host, compute) + one.pack + one.seconds)
        compute = max(compute, arrives[slot])
        host = max(host, compute) if machine.blocking else host
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
    # Deadlines first: when compute reads what a flight brings, less what is to be unpacked before; a reduction, which keeps its
    # input alive, not much later than it could end. Then backwards in time: of the flights whose readers are all placed, the
    # one with the latest deadline is put right before what its stream does next.
    flights = windows.flights
    deadline = [times[one.high] for one in flights]
    _leave_unpacking(windows, times, deadline)
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
            # Negative, as a heap gives the smallest first and the latest deadline is wanted.
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


def _leave_unpacking(windows: Windows, times: Sequence[float], deadline: list[float]) -> None:
    """Lower the deadline of each flight that must be unpacked, so that it can be while compute waits for another."""
    # By slot, how long compute is blocked there by the ideal clock. An unpack takes its seconds from the nearest block before
    # its reader that has as many left.
    waits: dict[int, float] = {}
    for slot in sorted({one.high for one in windows.flights if one.high}):
        waits[slot] = times[slot] - times[slot - 1] - windows.seconds[slot - 1]
    slots = [slot for slot, seconds in waits.items() if seconds > 0]
    for one in sorted(windows.flights, key=lambda one: one.high):
        if one.unpack:
            at = bisect_left(slots, one.high)
            for slot in reversed(slots[max(0, at - NEAR) : at]):
                if waits[slot] >= one.unpack:
                    waits[slot] -= one.unpack
                    deadline[one.number] = min(deadline[one.number], times[slot] - one.unpack)
                    break
