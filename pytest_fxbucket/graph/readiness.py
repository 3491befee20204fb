"""How early nodes of the optimizer could stand: right behind the last node that each needs and that is not the optimizer's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order


@dataclass(frozen=True, slots=True)
class Ready:
    """What a node of the optimizer waits for."""

    place: float
    """Of the last node that it needs and that is not the optimizer's."""
    entries: frozenset[str]
    """Whose reductions it needs, directly or not."""
    joins: int
    """The first node on the way to it, or itself, that needs those of several entries; -1 if none does."""


def readiness(
    order: Order, updating: Set[int], waits: Mapping[int, str], places: Sequence[float] | None = None
) -> dict[int, Ready]:
    """For each of ``updating`` that needs a reduction what it waits for; one walk, with a bit for each entry.

    ``waits`` has the waits for reductions with their entries; ``places`` says where nodes will stand, left out: where they do.
    """
    names = list(dict.fromkeys(waits.values()))
    bit = {name: 1 << number for number, name in enumerate(names)}
    bits, joins = [0] * len(order.nodes), [-1] * len(order.nodes)
    place = [float(index) for index in range(len(order.nodes))] if places is None else list(places)
    sets: dict[int, frozenset[str]] = {0: frozenset()}
    found: dict[int, Ready] = {}
    for index, before in enumerate(order.before):
        known = bit[waits[index]] if index in waits else 0
        for source in before:
            known |= bits[source]
        bits[index] = known
        if index not in updating:
            continue
        place[index] = max((place[source] for source in before), default=-1.0)
        if known & (known - 1):
            joins[index] = next((joins[source] for source in before if joins[source] >= 0), index)
        if known:
            if known not in sets:
                sets[known] = frozenset(name for name in names if known & bit[name])
            found[index] = Ready(place[index], sets[known], joins[index])
    return found


def updates_between(found: Mapping[int, Ready], spans: Sequence[tuple[int, int, str]]) -> list[tuple[str, ...]]:
    """For each (begin, end, entry) of ``spans`` the other entries of which an update in ``found`` stands between, in order."""
    places = sorted(found)
    return [
        tuple(
            dict.fromkeys(
                name
                for place in places[bisect_right(places, begin) : bisect_left(places, end)]
                for name in sorted(found[place].entries - {own})
            )
        )
        for begin, end, own in spans
    ]
