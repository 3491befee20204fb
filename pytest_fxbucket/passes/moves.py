"""Moves nodes as little as possible: what a node needs goes up with it, what reads it goes down with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.ops import overload, written_arguments

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

    Raises :class:`PassError`, before anything moved, if ``anchor`` or another collective is among what they need, or if a
    value would change on the way.
    """
    wanted = set(nodes)
    moving = needs_after(wanted, anchor)
    for node in moving:
        if node is anchor or (node not in wanted and _communicates(node)):
            raise PassError(f"{min(wanted).name} cannot be launched before {anchor.name}: it depends on {node.name}")
    put_before(moving, anchor)


def sink(node: fx.Node, anchor: fx.Node) -> None:
    """Put ``node`` and those of its readers that stand before ``anchor`` right behind ``anchor``.

    Raises :class:`PassError`, before anything moved, if ``anchor`` or another collective depends on ``node``, or if a value
    would change on the way.
    """
    moving = readers_before(node, anchor)
    blocked = next((m for m in moving if m is not node and _communicates(m)), None)
    if blocked is None and any(source in set(moving) for source in anchor.all_input_nodes):
        blocked = anchor
    if blocked is not None:
        raise PassError(f"{node.name} cannot wait until {anchor.name} is launched: {blocked.name} depends on it")
    refuse_changed_values(moving, node, anchor)
    for moved in reversed(moving):
        anchor.append(moved)


def put_before(moving: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Put ``moving``, given in graph order, right before ``anchor``. Raises as :func:`refuse_changed_values` does."""
    if moving:
        refuse_changed_values(moving, min(moving[0], anchor), max(moving[-1], anchor))
    for node in moving:
        anchor.prepend(node)


def refuse_changed_values(moving: Sequence[fx.Node], first: fx.Node, last: fx.Node) -> None:
    """Raise :class:`PassError` if ``moving`` cannot go past the other nodes from ``first`` to ``last`` with the same values.

    Edges carry no order between a write in place and a read, nor between two random numbers.
    """
    moved = set(moving)
    written: dict[fx.Node, fx.Node] = {}
    node = first
    while True:
        if node not in moved:
            written.update({base(target): node for target in written_arguments(node)})
        if node is last:
            break
        node = node.next
    for node in moving:
        op = overload(node)
        if written_arguments(node):
            raise PassError(f"{node.name} cannot be moved safely: {node.target} writes in place")
        if op is not None and torch.Tag.nondeterministic_seeded in op.tags:
            raise PassError(f"{node.name} cannot be moved safely: {node.target} draws random numbers")
        for storage in map(base, (node, *node.all_input_nodes)):
            if storage in written:
                writer = written[storage]
                raise PassError(
                    f"{node.name} cannot be moved safely past {writer.name}: {writer.target} writes in place to {storage.name}"
                )


def _communicates(node: fx.Node) -> bool:
    return collectives.is_wait(node) or collectives.launch_kind(node) is not None
