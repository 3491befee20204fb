"""Sweeps: stretches of a trace that go through all layers once, up or down; each layer's stretch of it is a chunk.

Parameters among the inputs, forward, backward, gradients among the outputs: each is a sweep. The first and the last unit may
differ from the others at their edges, and stay what they are; the units between are the repeats of each other. What lies
between two chunks belongs to the chunk before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pytest_fxbucket.capture.repeat.errors import NotAlike


@dataclass(frozen=True, slots=True)
class Sweep:
    """Positions of each unit between the first and the last, in a sequence."""

    up: bool
    chunks: tuple[range, ...]
    """Of units 1, 2, ... in this order, whichever way the sweep goes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: the sweep, the unit, and the position in the chunk."""

    sweep: int
    unit: int
    offset: int


Items = list[int | Sweep]
"""A sequence: positions that lie in no sweep, and sweeps."""


def sweeps_of(units: Sequence[int | None], count: int) -> Items:
    """The sweeps in a sequence that says of each position which of ``count`` units it belongs to, None for none.

    Raises :class:`NotAlike` if units are not gone through one after the other, or have chunks of different lengths.
    """
    stretches = _stretches(units)
    items: Items = []
    position = 0
    i = 0
    while i < len(stretches):
        if stretches[i][0] in (0, count - 1):
            i += 1
            continue
        sweep = _sweep(stretches, i, count)
        start = min(chunk.start for chunk in sweep.chunks)
        items += [*range(position, start), sweep]
        position = max(chunk.stop for chunk in sweep.chunks)
        i += count - 2
    return [*items, *range(position, len(units))]


def places_of(items: Items) -> dict[int, Place]:
    """The place of each position that lies in a sweep."""
    sweeps = [item for item in items if isinstance(item, Sweep)]
    return {
        position: Place(number, unit, offset)
        for number, sweep in enumerate(sweeps)
        for unit, chunk in enumerate(sweep.chunks, 1)
        for offset, position in enumerate(chunk)
    }


def repeated(items: Items, template: int, count: int) -> list[tuple[int, int | None]]:
    """The sequence for ``count`` units instead of ``template``: position in the template's, and unit, None outside sweeps."""
    found: list[tuple[int, int | None]] = []
    for item in items:
        if isinstance(item, int):
            found.append((item, None))
            continue
        order = range(1, count - 1) if item.up else range(count - 2, 0, -1)
        found += [(position, unit) for unit in order for position in item.chunks[source_of(unit, template, count) - 1]]
    return found


def source_of(unit: int, template: int, count: int) -> int:
    """Unit of the template that unit ``unit`` of ``count`` is a copy of: the ends are themselves, the rest the third one."""
    if unit <= MIDDLE:
        return unit
    return max(MIDDLE, unit - (count - template))


MIDDLE = 2
"""The unit that is repeated: it has neighbours on both sides that are repeats as well."""


def _stretches(units: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """(unit, first position, position behind the last) of neighbours of one unit, what belongs to none left out."""
    marked = [(unit, position) for position, unit in enumerate(units) if unit is not None]
    found = []
    for unit, group in groupby(marked, key=lambda mark: mark[0]):
        positions = [position for _, position in group]
        found.append((unit, positions[0], positions[-1] + 1))
    return found


def _sweep(stretches: list[tuple[int, int, int]], i: int, count: int) -> Sweep:
    up = stretches[i][0] == 1
    wanted = list(range(1, count - 1)) if up else list(range(count - 2, 0, -1))
    found = stretches[i : i + count - 2]
    if [unit for unit, _, _ in found] != wanted:
        shown = ", ".join(str(unit) for unit, _, _ in found)
        raise NotAlike(f"the trace goes through the layers in the order {shown}, not one after the other")
    starts = [start for _, start, _ in found]
    after = stretches[i + count - 2] if i + count - 2 < len(stretches) else None
    goes_on = after is not None and after[0] == (count - 1 if up else 0)
    end = after[1] if after is not None and goes_on else found[-1][2]
    chunks = [range(start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True)]
    if len({len(chunk) for chunk in chunks}) > 1:
        lengths = ", ".join(str(len(chunk)) for chunk in chunks)
        raise NotAlike(f"layers have different numbers of nodes or values in the trace: {lengths}")
    return Sweep(up, tuple(chunks if up else reversed(chunks)))
