"""Which side of a step a launch works for, forward or backward, and in which round: each microbatch has one of both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.gradients import returned
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.updates import made_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value
    from pytest_fxbucket.graph.order import Order

Side = Literal["forward", "backward"]
"""Updates, and what else comes after backward, count as backward."""


class Turn(NamedTuple):
    """A stretch of compute of one side."""

    side: Side
    round: int
    """How many stretches of its side stand before it."""


class Turns:
    """The stretches of a graph's compute."""

    def __init__(self, order: Order, outputs: Sequence[Value]) -> None:
        self._order = order
        self._of: dict[fx.Node, Turn] = {}
        self._begins: list[int] = []
        self._turns: list[Turn] = []
        counts: dict[Side, int] = {"forward": 0, "backward": 0}
        losses = _losses(order, outputs)
        needed = made_of(losses[0].graph, losses) if losses else set()
        is_marked = any(direction_of(node) == "backward" for node in order.nodes)
        for index, node in enumerate(order.nodes):
            side = _side(node, node in needed, bool(losses), is_marked) if computes(node) else None
            if side is not None and (not self._turns or self._turns[-1].side != side):
                self._begins.append(index)
                self._turns.append(Turn(side, counts[side]))
                counts[side] += 1

    def of(self, launch: fx.Node) -> Turn:
        """Where the first compute stands that reads what ``launch`` brings; ``launch`` itself if none does."""
        if launch not in self._of:
            place = min((self._order.index[node] for node in _readers(launch)), default=self._order.index[launch])
            at = bisect_right(self._begins, place) - 1
            self._of[launch] = self._turns[max(at, 0)] if self._turns else Turn("forward", 0)
        return self._of[launch]


def _losses(order: Order, outputs: Sequence[Value]) -> list[fx.Node]:
    nodes = returned(order.nodes[-1])
    return [node for node, value in zip(nodes, outputs, strict=True) if value.role == "loss" and hasattr(node, "users")]


def _side(node: fx.Node, is_needed: bool, has_loss: bool, is_marked: bool) -> Side | None:
    """None for what is of neither: updates, and what forward computes besides the loss."""
    if is_needed:
        return "forward"
    if direction_of(node) == "backward" or (has_loss and not is_marked):
        return "backward"
    return None if has_loss else "forward"


def _readers(launch: fx.Node) -> list[fx.Node]:
    """Compute that reads what ``launch`` brings, through whatever only moves it, further launches too."""
    queue, seen = [launch], {launch}
    found: list[fx.Node] = []
    for node in queue:
        for user in node.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            (found if computes(user) else queue).append(user)
    return found
