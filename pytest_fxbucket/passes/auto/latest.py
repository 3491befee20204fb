"""When each collective must start at the latest so that nothing waits for it.

Backwards along compute: all of a stream one behind the other, those that are needed last at the end (earliest due date first,
J. R. Jackson, 1955, mirrored).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.windows import Windows

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
