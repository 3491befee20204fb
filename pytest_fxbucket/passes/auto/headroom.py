"""What a schedule may take, and how an order is made to keep what may be in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.auto.machine import WAIT

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.windows import MovableCollective, Windows
    from pytest_fxbucket.plan.schema_bucket import Overlap

GB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What a schedule may take."""

    peak: float = inf
    """Bytes that live at most."""
    in_flight: float = inf
    """Bytes of collectives that are in flight at most, by their larger sides."""
    gathers: float = inf
    """All-gathers that are in flight at most."""

    @classmethod
    def of(cls, rules: Overlap, before: int) -> Headroom:
        """What ``rules`` leave where ``before`` bytes lived at once so far; of both limits of memory the tighter one holds."""
        peaks = [before + share * before for share in (rules.max_memory_increase,) if share is not None]
        peaks += [before + more * GB for more in (rules.max_memory_increase_gb,) if more is not None]
        return cls(
            peak=min(peaks, default=inf),
            in_flight=inf if rules.max_in_flight_gb is None else rules.max_in_flight_gb * GB,
            gathers=inf if rules.max_prefetch is None else max(1, rules.max_prefetch),
        )

    def lacks(self, flying: Sequence[MovableCollective]) -> bool:
        """Whether these are more than may be in flight at once."""
        return sum(one.size for one in flying) > self.in_flight or self.lacks_gathers(flying)

    def lacks_gathers(self, flying: Sequence[MovableCollective]) -> bool:
        """Whether all-gathers among these are more than may be in flight at once."""
        return sum(one.is_gather for one in flying) > self.gathers


class NoRoomError(PlanError):
    """No order of a graph keeps the limits."""


class TogetherError(NoRoomError):
    """Collectives that must be in flight at once are more than may be."""


def within(room: Headroom, windows: Windows, order: Sequence[int]) -> list[int]:
    """``order``, with waits pulled up: before a launch that there is no room for, flights are waited for, the oldest first.

    Raises :class:`TogetherError` where these can only be waited for behind that launch.
    """
    if room.in_flight == room.gathers == inf:
        return list(order)
    placed = _Placed(room, windows, {node: at for at, node in enumerate(order)}, {one.launch: one for one in windows.flights})
    for node in order:
        placed.put(node)
    return list(placed.done)


@dataclass(slots=True)
class _Placed:
    """An order that is made node by node."""

    room: Headroom
    windows: Windows
    place: dict[int, int]
    """Of each node in the order that is asked for."""
    flights: dict[int, MovableCollective]
    """By launch."""
    flying: list[MovableCollective] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    """Nodes that others are placed for at present."""
    done: dict[int, None] = field(default_factory=dict)

    def put(self, node: int) -> None:
        """Place ``node`` behind all that it must stand behind."""
        # The order that is asked for keeps dependences. Only a wait that is pulled up finds anything missing before it.
        if node in self.done:
            return
        self.pending.append(node)
        for needed in self.windows.order.before[node]:
            self.put(needed)
        machine, one = self.windows.machine, self.flights.get(node)
        if one is not None:
            self._make_room(one)
            self.flying.append(one)
        elif machine.stream[node] == WAIT:
            self.flying = [other for other in self.flying if other.launch != machine.launch[node]]
        self.pending.pop()
        self.done[node] = None

    def _make_room(self, one: MovableCollective) -> None:
        while self.flying and self.room.lacks([*self.flying, one]):
            only_gathers = self.room.lacks_gathers([*self.flying, one])
            full = [other for other in self.flying if other.is_gather or not only_gathers]
            first = next((self._wait(other) for other in full if self._may_end(self._wait(other))), None)
            if first is None:
                raise TogetherError(self._why(one, full, only_gathers))
            self.put(first)

    def _wait(self, one: MovableCollective) -> int:
        return min(one.waits, key=self.place.__getitem__)

    def _may_end(self, wait: int) -> bool:
        """Whether ``wait`` needs none of the nodes that are being placed, which would make a circle."""
        before = self.windows.order.before
        needed = reached([wait], lambda node: [other for other in before[node] if other not in self.done])
        return not any(node in needed for node in self.pending)

    def _why(self, one: MovableCollective, full: Sequence[MovableCollective], only_gathers: bool) -> str:
        limit = f"max_prefetch = {self.room.gathers:g}" if only_gathers else f"max_in_flight_gb = {self.room.in_flight / GB:g}"
        new, *others = (self.windows.order.nodes[other.launch].name for other in (one, *full))
        return (
            f"[overlap] {limit} leaves no room for {new} beside {' and '.join(others)}, which can only be waited for behind it"
        )
