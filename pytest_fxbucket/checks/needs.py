"""Which launches of a graph need which others' results, through any path of values and writes; asked of groups of launches.

All pairs would be the square of the launches. What is asked is less: who in a group needs whom in it, and which part of a group
needs which. One walk, with a bit for each part at every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order

Groups = Sequence[Sequence[str]]
"""Groups of launches, by the names of their nodes; no launch is in two."""


@dataclass(frozen=True, slots=True)
class Parted:
    """Groups of launches in parts of which none holds two launches that need each other."""

    level: dict[str, int]
    """Of each launch the number of its part within its group."""
    part: dict[str, int]
    """The same among the parts of all groups."""
    below: list[int]
    """For each part those of which a launch is needed by one of its own, as bits of their numbers."""


class Needs:
    """Of the launches of the graph that ``order`` is of; without one, none needs another."""

    def __init__(self, order: Order | None = None) -> None:
        self._order = order

    def parted(self, groups: Groups) -> Parted:
        """Each of ``groups`` in as few parts as the longest chain of launches in it that need each other."""
        part_of: dict[tuple[int, int], int] = {}
        found = Parted({}, {}, [])
        group_of = {name: number for number, group in enumerate(groups) for name in group}
        above: list[int] = []
        for name, before in self._nodes(group_of):
            bits = 0
            for earlier in before:
                bits |= above[earlier]
            if name in group_of:
                found.level[name] = self._lowest(bits, group_of[name], part_of)
                found.part[name] = number = part_of[group_of[name], found.level[name]]
                found.below.extend([0] * (number + 1 - len(found.below)))
                found.below[number] |= bits
                bits |= 1 << number
            above.append(bits)
        return found

    def _nodes(self, launches: Iterable[str]) -> Iterator[tuple[str, Sequence[int]]]:
        """(name, what it needs) of each node, in order."""
        if self._order is None:
            return ((name, ()) for name in launches)
        return ((node.name, before) for node, before in zip(self._order.nodes, self._order.before, strict=True))

    def _lowest(self, needed: int, group: int, part_of: dict[tuple[int, int], int]) -> int:
        """The first level of ``group`` of which nothing is needed; its part is in ``part_of`` then."""
        level = 0
        while needed >> part_of.setdefault((group, level), len(part_of)) & 1:
            level += 1
        return level
