"""What a schedule may take, and how an order is made to keep what may be in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.auto.machine import WAIT

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.windows import Flight, Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a schedule may take."""

    peak: float = inf
    """Bytes that live at most."""
    in_flight: float = inf
    """Bytes of collectives that are in flight at most, by their larger sides."""
    gathers: float = inf
    """All-gathers that are in flight at most."""

    def lacks(self, flying: Sequence[Flight]) -> bool:
        """Whether these are more than may be in flight at once."""
        return sum(one.size for one in flying) > self.in_flight or self.lacks_gathers(flying)

    def lacks_gathers(self, flying: Sequence[Flight]) -> bool:
        """Whether all-gathers among these are more than may be in flight at once."""
        return sum(one.is_gather for one in flying) > self.gathers


def within(room: Room, windows: Windows, order: Sequence[int]) -> list[int]:
    """``order``; before each launch that there is no room for, those that were launched first are waited for.

    So it keeps what may be in flight, if each launch alone does: what a wait needs is its launch, and views of that.
    """
    if room.in_flight == room.gathers == inf:
        return list(order)
    flights = {one.launch: one for one in windows.flights}
    place = {node: at for at, node in enumerate(order)}
    flying: list[Flight] = []
    found: dict[int, None] = {}
    for node in order:
        if node in found:
            continue
        one = flights.get(node)
        if one is not None:
            while flying and room.lacks([*flying, one]):
                only_gathers = room.lacks_gathers([*flying, one])
                first = next(other for other in flying if other.is_gather or not only_gathers)
                flying.remove(first)
                for needed in _needed(windows, min(first.waits, key=place.__getitem__), found):
                    found[needed] = None
            flying.append(one)
        elif windows.machine.stream[node] == WAIT:
            flying = [other for other in flying if other.launch != windows.machine.launch[node]]
        found[node] = None
    return list(found)


def _needed(windows: Windows, node: int, done: dict[int, None]) -> Iterator[int]:
    """``node`` behind all that it must stand behind and that is not ``done``."""
    if node not in done:
        for one in windows.order.before[node]:
            yield from _needed(windows, one, done)
        yield node
