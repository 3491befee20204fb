"""Moves nodes as little as possible: what a node needs goes up with it, what reads it goes down with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives

if TYPE_CHECKING:
    from torch import fx


def needs_after(nodes: Iterable[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """``nodes`` and all that they need, as far as it stands at or behind ``anchor``; in graph order."""
    found: set[fx.Node] = set()
    queue = [node for node in nodes if not node < anchor]
    for node in queue:
        if node in found:
            continue
        found.add(node)
        queue.extend(source for source in node.all_input_nodes if not source < anchor)
    return sorted(found)


def readers_before(node: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """``node`` and all that depends on it, as far as it stands before ``anchor``; in graph order."""
    found: set[fx.Node] = set()
    queue = [node]
    for current in queue:
        if current in found:
            continue
        found.add(current)
        queue.extend(user for user in current.users if user < anchor)
    return sorted(found)


def hoist(nodes: Iterable[fx.Node], anchor: fx.Node) -> None:
    """Put ``nodes`` and what they need right before ``anchor``.

    Raises :class:`PassError`, before anything moved, if ``anchor`` or another collective is among what they need.
    """
    wanted = set(nodes)
    moving = needs_after(wanted, anchor)
    for node in moving:
        if node is anchor or (node not in wanted and _communicates(node)):
            raise PassError(f"{min(wanted).name} cannot be launched before {anchor.name}: it depends on {node.name}")
    for node in moving:
        anchor.prepend(node)


def sink(node: fx.Node, anchor: fx.Node) -> None:
    """Put ``node`` and those of its readers that stand before ``anchor`` right behind ``anchor``.

    Raises :class:`PassError`, before anything moved, if ``anchor`` or another collective depends on ``node``.
    """
    moving = readers_before(node, anchor)
    blocked = next((m for m in moving if m is not node and _communicates(m)), None)
    if blocked is None and any(source in set(moving) for source in anchor.all_input_nodes):
        blocked = anchor
    if blocked is not None:
        raise PassError(f"{node.name} cannot wait until {anchor.name} is launched: {blocked.name} depends on it")
    for moved in reversed(moving):
        anchor.append(moved)


def _communicates(node: fx.Node) -> bool:
    return collectives.is_wait(node) or collectives.launch_kind(node) is not None
