"""Which launches of a graph need which others' results, through any path of values and writes; asked of groups of launches.

All pairs would be the square of the launches. What is asked is less: who in a group needs whom in it, and which group needs
which. One walk each, with a bit for each group (and level) at every node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order

Groups = Sequence[Sequence[str]]
"""Groups of launches, by the names of their nodes; no launch is in two."""


class Needs:
    """Of the launches of the graph that ``order`` is of; without one, none needs another."""

    def __init__(self, order: Order | None = None) -> None:
        self._order = order

    def levels(self, groups: Groups) -> Mapping[str, int]:
        """The lowest number for each launch that none of its group which it needs has: as few as the longest chain of them."""
        if self._order is None:
            return {name: 0 for group in groups for name in group}
        bits: dict[tuple[int, int], int] = {}
        found: dict[str, int] = {}
        above: list[int] = []
        for name, group, needed in self._walk(groups, above):
            level = 0
            while needed & (bit := bits.setdefault((group, level), 1 << len(bits))):
                level += 1
            found[name] = level
            above[-1] |= bit
        return found

    def below(self, groups: Groups) -> list[int]:
        """For each group those of which a launch is needed by one of its own, as bits; its own bit may be among them."""
        found = [0] * len(groups)
        above: list[int] = []
        for _, group, needed in self._walk(groups, above) if self._order is not None else ():
            found[group] |= needed
            above[-1] |= 1 << group
        return found

    def _walk(self, groups: Groups, above: list[int]) -> Iterator[tuple[str, int, int]]:
        """(launch, its group, bits of all that it needs); the caller adds the launch's own bits to the last of ``above``."""
        assert self._order is not None
        group_of = {name: number for number, group in enumerate(groups) for name in group}
        for node, before in zip(self._order.nodes, self._order.before, strict=True):
            bits = 0
            for earlier in before:
                bits |= above[earlier]
            above.append(bits)
            group = group_of.get(node.name)
            if group is not None:
                yield node.name, group, bits
