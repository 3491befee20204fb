"""When memory of a graph is written, by whomever: by what says so, and by what may write anything."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.effects import effects_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order


class Writes:
    """The writes of a graph as it was when ``order`` was read. Places are indices of nodes in it.

    A collective in place counts where it is launched: until its wait nobody may read what it fills.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        barred = bool(order.barriers)
        self._anywhere = [i for i, node in enumerate(order.nodes) if barred and effects_of(node).barrier]
        self._of: dict[frozenset[int], list[int]] = {}

    def last(self, node: fx.Node, begin: int, end: int) -> int | None:
        """Place of the last write behind ``begin`` and before ``end`` to where ``node``'s result lives; None without one."""
        places = self._places(node)
        at = bisect_left(places, end) - 1
        return places[at] if at >= 0 and places[at] > begin else None

    def first(self, node: fx.Node, begin: int, end: int) -> fx.Node | None:
        """The node that writes first where ``node``'s result lives, behind ``begin`` and before ``end``; None without one."""
        places = self._places(node)
        at = bisect_right(places, begin)
        return self.order.nodes[places[at]] if at < len(places) and places[at] < end else None

    def _places(self, node: fx.Node) -> list[int]:
        storages = self.order.storages(node)
        if storages not in self._of:
            self._of[storages] = sorted({*self.order.writing(node), *self._anywhere}) if storages else []
        return self._of[storages]


def named(writer: fx.Node) -> str:
    """``writer`` as the subject of a sentence on what it writes."""
    may = " may" if effects_of(writer).barrier else ""
    return f"{writer.name} ({writer.target}){may} write{'' if may else 's'}"
