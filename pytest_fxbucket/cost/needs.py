"""What lives in any order of a graph's nodes: each storage with all that need it, so that another order is sums alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.memory import Storage, Walk

if TYPE_CHECKING:
    from torch import fx


class Needs(Walk):
    """As :func:`pytest_fxbucket.cost.memory.liveness_of` walks a graph."""

    def __init__(self, graph: fx.Graph, rounding: int = 1) -> None:
        super().__init__(repeat(None))
        self._places: dict[Storage, list[int]] = {}
        self._peaks: dict[tuple[int, ...], int] = {}
        nodes = list(graph.nodes)
        for place, node in enumerate(nodes):
            self.meet(place, node)
        self.end(nodes[-1], len(nodes) - 1, ())
        self._lives = [
            (-(-one.bytes // rounding) * rounding, one.first, tuple(dict.fromkeys(self._places.get(one, ()))))
            for one in self.storages
        ]

    def need(self, storage: Storage, place: int, node: fx.Node) -> None:
        """Note it."""
        self._places.setdefault(storage, []).append(place)

    def at(self, order: Sequence[int]) -> list[int]:
        """Bytes that live while each node of ``order`` runs; nodes are named by their place in the graph."""
        place = [0] * len(order)
        for now, before in enumerate(order):
            place[before] = now
        change = [0] * (len(order) + 1)
        for size, first, needs in self._lives:
            begin = place[first] if first >= 0 else 0
            change[begin] += size
            change[max([place[one] for one in needs], default=begin) + 1] -= size
        return list(accumulate(change))[:-1]

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes that live at once; of an order that was asked for before it is known."""
        key = tuple(order)
        if key not in self._peaks:
            self._peaks[key] = max(self.at(key))
        return self._peaks[key]

    def made(self, node: fx.Node) -> int:
        """Bytes of the storages of ``node``'s value."""
        return sum(one.bytes for one in self.of.get(node, ()))
