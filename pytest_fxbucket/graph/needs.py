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
    """Bounds of each of ``launches``. One walk down the graph and one up, O(nodes + edges)."""
    fixed = [not moves_freely(node) for node in order.nodes]
    blocked: list[int] = []
    for before in order.before:
        last = -1
        for earlier in before:
            last = max(last, earlier if fixed[earlier] else blocked[earlier])
        blocked.append(last)
    sent = {order.index[launch] for launch in launches}
    end = len(order.nodes)
    needed = [end] * end
    for index in range(end - 1, -1, -1):
        first = index if index in sent else needed[index]
        for earlier in order.before[index]:
            needed[earlier] = min(needed[earlier], first)
    at = {launch: order.index[launch] for launch in launches}
    return {launch: Needs(blocked[i], needed[i] if needed[i] < end else None) for launch, i in at.items()}
