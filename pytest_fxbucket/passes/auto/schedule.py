"""Tries orders of a graph, and takes the one with the least exposed time that keeps the limits; if none is better, its own."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import StorageNeeds
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.auto.fill_waits import filled
from pytest_fxbucket.passes.auto.headroom import GB, Headroom, NoRoomError, within
from pytest_fxbucket.passes.auto.latest_starts import DRIFT, ideal, latest
from pytest_fxbucket.passes.auto.machine import COMPUTE, NodeCosts, machine_of
from pytest_fxbucket.passes.auto.sweep import Sweep, lazy
from pytest_fxbucket.passes.auto.windows import Nodes, Windows
from pytest_fxbucket.passes.report import Schedule

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.auto.estimates import Estimates
    from pytest_fxbucket.plan.schema_bucket import Overlap

SAME = 1e-9
"""Seconds of exposure that count as none."""
_WAYS = ((False, False), (True, False), (True, True))
"""Whether light compute sinks behind waits, and packs fill waits."""
_TIGHTER = 4
"""How often a sweep whose order needs too much memory is given less."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The order that was found for a graph."""

    order: tuple[fx.Node, ...] | None
    """The nodes; None: the graph is best as it is."""
    kept: tuple[tuple[fx.Node, fx.Node], ...]
    """(earlier, later) that make the overlap: a launch before compute, compute before a wait."""
    came_to: Schedule


def scheduled(graph: fx.Graph, estimates: Estimates, rules: Overlap, before: int | None = None) -> Scheduled:
    """Find the order of ``graph``, which is not changed; limits of memory in ``rules`` count from ``before`` bytes, or from its
    own peak.

    Raises :class:`PlanError` for limits that cannot be kept (:class:`NoRoomError` where smaller collectives could), and what
    ``estimates`` raise.
    """
    order = order_of(graph)
    machine = machine_of(order.nodes, estimates)
    needs = StorageNeeds(graph, estimates.cluster.rounding)
    known = Nodes(order, machine)
    several = [Windows(known, needs, sinks=sinks, fills=fills) for sinks, fills in _WAYS]
    windows = several[0]
    own = list(range(len(order.nodes)))
    given, peak_before = machine.run(own), needs.peak(own)
    room = Headroom.of(rules, peak_before if before is None else before)
    _refuse_larger(windows, room)
    # Candidates are offered one by one, and the best so far is kept: the graph's own order, one sweep for each way of moving
    # nodes, one more with reductions put off further, and at last the orders found, with the time of their waits filled.
    best = _Best(machine, needs, room)
    best.offer(within(room, windows, own))
    orders = [_order(one, needs, room, DRIFT) for one in several]
    ways = [one for one, order in zip(several, orders, strict=True) if best.offer(order)]
    for one in ways[-1:]:  # the best way once more, with reductions as far off as they like
        best.offer(_order(one, needs, room, inf))
    if best.order is not None:
        best.fill(several[-1], best.order)
    if ways[-1:] != several[-1:]:
        # Filling may leave less of the last way's order, though that was no better so far: it gathers early what must be
        # unpacked.
        best.fill(several[-1], orders[-1])
    if best.order is None:
        # What takes the least memory: there may be room for it where no sweep found any, and else the error says how much.
        best.offer(within(room, windows, windows.arranged(lazy(windows))))
    found = best.order
    if found is None:
        raise NoRoomError(
            f"[overlap] max_memory_increase leaves {room.peak / GB:.4g} GB, and the graph needs {best.least / GB:.4g} GB with "
            "each collective where it is needed"
        )
    times, kept = machine.run(found), tuple(_hidden_flights(windows, found))
    hidden = sum(times.blocked.get(one.launch, 0.0) <= SAME for one in windows.flights)
    pairs = tuple((earlier.name, later.name) for earlier, later in kept)
    came_to = Schedule(given.exposed, times.exposed, peak_before, needs.peak(found), hidden, len(windows.flights), pairs)
    return Scheduled(None if found == own else tuple([order.nodes[index] for index in found]), kept, came_to)


@dataclass(slots=True)
class _Best:
    """The order with the least exposed time so far."""

    machine: NodeCosts
    needs: StorageNeeds
    room: Headroom
    order: list[int] | None = None
    exposed: float = inf
    least: float = inf
    """Bytes that live at the peak of what needs least of all that was offered."""

    def offer(self, order: list[int]) -> bool:
        """Take ``order`` if it is better, and there is room for it; whether it was."""
        exposed = self.machine.run(order).exposed
        if exposed >= self.exposed - SAME:
            return False
        peak = self.needs.peak(order)
        self.least = min(self.least, peak)
        if peak > self.room.peak:
            return False
        self.order, self.exposed = order, exposed
        return True

    def fill(self, windows: Windows, order: list[int]) -> None:
        """Offer ``order`` with the time of its waits filled, as far as there is room."""
        if self.exposed <= SAME:
            return
        nodes, seconds = windows.order.nodes, self.machine.seconds
        sizes = [self.needs.bytes_made(node) if takes > 0 else 0 for node, takes in zip(nodes, seconds, strict=True)]
        # At first without a limit, since what is pulled up may not live at the peak; if it does, with the room that is left.
        for more in (inf, self.room.peak - self.needs.peak(order)):
            found = filled(windows, order, sizes, more)
            if self.needs.peak(found) <= self.room.peak:
                self.offer(found)
                break


def _order(windows: Windows, needs: StorageNeeds, room: Headroom, drift: float) -> list[int]:
    """The order of one sweep; where it needs too much memory, of one that is given less."""
    if not windows.flights:
        return list(range(len(windows.order.nodes)))
    basis = windows.arranged(lazy(windows))
    live = windows.by_slot(basis, needs.at(basis))
    times = ideal(windows)
    late = latest(windows, times, drift).starts
    allowed = room
    # A sweep counts memory by slots, not by nodes. Where it comes out too high, the next one is given as much less.
    for _ in range(_TIGHTER):
        found = within(room, windows, windows.arranged(Sweep(windows, times, late, allowed, list(live)).run()))
        over = needs.peak(found) - room.peak
        if over <= 0:
            break
        allowed = Headroom(peak=allowed.peak - over, in_flight=room.in_flight, gathers=room.gathers)
    return found


def _refuse_larger(windows: Windows, room: Headroom) -> None:
    """Refuse a limit that one collective alone does not keep."""
    largest = max(windows.flights, key=lambda one: one.size, default=None)
    if largest is not None and largest.size > room.in_flight:
        raise PlanError(
            f"[overlap] max_in_flight_gb = {room.in_flight / GB:g} is less than {windows.order.nodes[largest.launch].name} "
            f"has alone, {largest.size / GB:.4g} GB"
        )


def kept_as_it_is(graph: fx.Graph, estimates: Estimates) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """As :attr:`Scheduled.kept`, of ``graph`` in the order that it has."""
    order = order_of(graph)
    machine = machine_of(order.nodes, estimates)
    sinks, fills = _WAYS[0]
    windows = Windows(Nodes(order, machine), StorageNeeds(graph, estimates.cluster.rounding), sinks=sinks, fills=fills)
    return tuple(_hidden_flights(windows, range(len(order.nodes))))


def _hidden_flights(windows: Windows, order: Sequence[int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each launch with the compute behind it, and each wait with the compute before it, of flights that compute hides."""
    nodes, machine = windows.order.nodes, windows.machine
    place = {node: at for at, node in enumerate(order)}
    work = [at for at, node in enumerate(order) if machine.stream[node] == COMPUTE and machine.seconds[node] > 0]
    for one in sorted(windows.flights, key=lambda one: place[one.launch]):
        begin, end = place[one.launch], min(place[wait] for wait in one.waits)
        inside = _between(work, begin, end)
        if inside:
            yield nodes[one.launch], nodes[order[inside[0]]]
            wait = min(one.waits, key=place.__getitem__)
            yield nodes[order[inside[1]]], nodes[wait]


def _between(places: Sequence[int], begin: int, end: int) -> tuple[int, int] | None:
    """The first and the last of ``places`` between ``begin`` and ``end``."""
    first, last = bisect_right(places, begin), bisect_left(places, end) - 1
    return (places[first], places[last]) if first <= last else None
