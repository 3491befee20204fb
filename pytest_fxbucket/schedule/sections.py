"""In which section of a schedule each event stands: forward, backward, optimizer; with microbatches forward #2 and so on.

A section is where its direction computes; another round of them begins with forward compute behind that of backward. What an
optimizer does before all gradients are reduced stands in the backward. What is done for the call before has no section of its
own, unless there is nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.buckets import Reading

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "optimizer")
_NAME = re.compile(rf"({'|'.join(DIRECTIONS)})(?: #(\d+))?")


class _Section(NamedTuple):
    name: str
    direction: Direction
    first: int
    last: int


class Sections:
    """Sections of one graph, by positions in it."""

    def __init__(self, reading: Reading) -> None:
        computes = sorted((*reading.computes, *reading.products))
        self._late = reading.late
        self._found = list(_sections((where, of) for where, of, _ in computes if where not in reading.late))
        backward = [b for b in reading.buckets if b.direction == "backward" and b.launch not in reading.late]
        self._reduced = max((where for bucket in backward for where in (bucket.launch, *bucket.waits)), default=-1)

    def computing(self, where: int, direction: Direction) -> str:
        """The section of ``direction`` that computes at ``where``; of an update that in which it stands."""
        if where in self._late:
            return self._standing(where, direction)
        if direction == "optimizer":
            return self._of_update(where)
        return next((one.name for one in self._found if one.direction == direction and where <= one.last), direction)

    def of(self, where: int, direction: Direction) -> str:
        """The section of a launch or wait that belongs to ``direction`` and stands at ``where``.

        Mostly one of its direction's own; a launch for backward in the midst of forward is one of forward's.
        """
        if where in self._late:
            return self._standing(where, direction)
        if direction == "optimizer":
            return self._of_update(where)
        here = next((i for i, one in enumerate(self._found) if where < one.last), len(self._found))
        own = [i for i, one in enumerate(self._found) if one.direction == direction]
        if not own:
            earlier = DIRECTIONS[: DIRECTIONS.index(direction)]
            return next((one.name for one in self._found[here:] if one.direction in earlier), direction)
        if 0 < here < len(self._found) and where < self._found[here].first and here - 1 in own:
            here -= 1
        mine = next((i for i in own if i >= here), own[-1])
        return self._found[min(here, mine)].name

    def _standing(self, where: int, direction: Direction) -> str:
        """Where something of the call before stands, whatever it is."""
        return next((one.name for one in self._found if where <= one.last), direction)

    def _of_update(self, where: int) -> str:
        """The last of the backward as long as anything of it goes on, be it a wait."""
        last = next((one for one in reversed(self._found) if one.direction == "backward"), None)
        if last is None or where > max(last.last, self._reduced):
            return "optimizer"
        return last.name


def _sections(computes: Iterable[tuple[int, Direction]]) -> Iterable[_Section]:
    """In order of round, then of direction; ``computes`` ascend."""
    places: dict[tuple[int, int], list[int]] = {}
    number, before = 0, 0
    for where, direction in computes:
        index = DIRECTIONS.index(direction)
        number += index == 0 < before
        before = index
        places.setdefault((number, index), []).append(where)
    counts = dict.fromkeys(DIRECTIONS, 0)
    for (_, index), found in sorted(places.items()):
        direction = DIRECTIONS[index]
        counts[direction] += 1
        name = direction if counts[direction] == 1 else f"{direction} #{counts[direction]}"
        yield _Section(name, direction, found[0], found[-1])


def direction_of(section: str) -> str:
    """``backward`` of the section ``backward #2``; empty if ``section`` is no section's name."""
    match = _NAME.fullmatch(section)
    return match[1] if match else ""


def in_order(sections: Iterable[str]) -> list[str]:
    """Names of sections as a step runs them, each once: forward, backward, forward #2, backward #2; what is done once last."""

    def place(section: str) -> tuple[int, int]:
        match = _NAME.fullmatch(section)
        assert match is not None
        return int(match[2] or 1), DIRECTIONS.index(match[1])

    names = set(sections)
    last = max((place(name)[0] for name in names), default=1)
    return sorted(names, key=lambda name: (last, 2) if name == DIRECTIONS[2] else place(name))
