"""What launches need of each other, and which launches no pass may merge with others, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name

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


# Which launches no pass may merge with others, and why: read from the graph before the pass.


_FRESH = ("aten::empty", "aten::new_empty", "aten::empty_like")


def why_apart(launch: fx.Node, order: Order) -> str:
    """Why ``launch`` must stay on its own; empty if it may share a bucket."""
    name, kind = operator_name(launch), collectives.launch_kind(launch) or "other"
    if not name.startswith("_c10d_functional::") or (collectives.ROWS[kind].merged and name not in collectives.MERGED):
        return f"{name} is not merged"
    if collectives.argument(launch, "group_size") == 1:
        return "its group has one rank"
    waits = collectives.waits_of(launch)
    parts = [user for user in launch.users if user.target is getitem] or [launch]
    early = any(not collectives.is_wait(user) for part in parts for user in part.users if user not in parts)
    if not waits or early or any(not part.users for part in parts):
        return "it is read without a wait, or never"
    return _buffer(launch) or _changed(launch, waits, order)


def _buffer(launch: fx.Node) -> str:
    buffer = launch.kwargs.get("out")
    if not isinstance(buffer, torch.fx.Node):
        return ""
    return "" if operator_name(buffer) in _FRESH and list(buffer.users) == [launch] else "its buffer is used elsewhere"


def _changed(launch: fx.Node, waits: list[fx.Node], order: Order) -> str:
    """Whether what it sends is written before all of it arrived."""
    begin, end = order.index[launch], min(order.index[wait] for wait in waits)
    written = (index for node in launch.all_input_nodes for index in order.writing(node))
    return "what it sends is written before its wait" if any(begin < index < end for index in written) else ""


def moves_freely(node: fx.Node) -> bool:
    """Whether ``node`` may be hoisted with a launch that needs it: a pack, or what neither communicates, writes nor draws."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    return not collectives.communicates(node) and (moves_data(node) or not effects_of(node).acts)
