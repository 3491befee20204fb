"""What launches need of each other, through any path: how far up one can be hoisted, how long one can be waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.apart import moves_freely

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order


@dataclass(frozen=True, slots=True)
class Needs:
    """Bounds of one launch, as positions in the graph."""

    blocked: int
    """Last node that it needs and that cannot be hoisted with it; -1 if there is none."""
    needed: int | None
    """First launch that needs what it brings; None if none does."""


def needs_of(order: Order, launches: Sequence[fx.Node]) -> dict[fx.Node, Needs]:
    """Bounds of each of ``launches``, which are in graph order. One walk with a set of launches, as bits, for each node."""
    bit = {order.index[launch]: 1 << number for number, launch in enumerate(launches)}
    blocks = [not moves_freely(node) for node in order.nodes]
    known: list[int] = []
    blocked: list[int] = []
    first: dict[int, int] = {}
    for index, before in enumerate(order.before):
        bits, last = 0, -1
        for earlier in before:
            bits |= known[earlier]
            last = max(last, earlier if blocks[earlier] else blocked[earlier])
        if index in bit:
            fresh = bits & ~sum(first)
            first |= {one: index for one in bit.values() if fresh & one}
            bits |= bit[index]
        known.append(bits)
        blocked.append(last)
    return {launch: Needs(blocked[order.index[launch]], first.get(1 << number)) for number, launch in enumerate(launches)}
