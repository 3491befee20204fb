"""Places that a scheduler asks for, of launches and waits: which nodes they are, and whether there can be such a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes.bucketer import hook_name, of
from pytest_fxbucket.passes.scheduler import overrides, place_by_hand
from pytest_fxbucket.words import show

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class NodePlace:
    """Right before ``node``: for the launch of ``bucket``, or for its waits."""

    bucket: Merged
    node: fx.Node
    where: str
    """Who asked for it, for errors."""
    when: str
    """What begins there: "... starts"."""


def launches(scheduler: Scheduler, gathers: Iterable[Merged]) -> list[NodePlace]:
    """Places of the launches of ``gathers``. One that is before another of these launches comes later in the list than that.

    Raises :class:`PlanError` for what is no node of the graph, and for launches in a circle.
    """
    return _in_turn(_places_by_hook(scheduler, "launch_before", "launch_at", gathers))


def waits(scheduler: Scheduler, reductions: Iterable[Merged]) -> list[NodePlace]:
    """Places of the waits of ``reductions``; raises :class:`PlanError` for what is no node of the graph."""
    return _places_by_hook(scheduler, "wait_before", "wait_before", reductions)


def _places_by_hook(scheduler: Scheduler, name: str, key: str, buckets: Iterable[Merged]) -> list[NodePlace]:
    hook, by_rule = getattr(scheduler, name), not overrides(scheduler, name)
    found: list[NodePlace] = []
    for bucket in buckets:
        node = hook(bucket)
        if node is None:
            continue
        if not isinstance(node, torch.fx.Node) or node not in scheduler.order.index:
            raise PlanError(
                f"{hook_name(scheduler, name)} must give a node of the graph or None for {of(bucket.first)}, not {show(node)}"
            )
        if by_rule:
            direction, entry = bucket.first.direction, bucket.first.entry
            other = getattr(scheduler.rules, key)[direction][entry]
            where = place_by_hand(key, direction, entry, other)
            found.append(NodePlace(bucket, node, where, f"the compute of {other!r} starts"))
        else:
            where = f"{hook_name(scheduler, name)}: {of(bucket.first)} before {node.name}"
            found.append(NodePlace(bucket, node, where, f"{node.name} starts"))
    return found


def _in_turn(places: Sequence[NodePlace]) -> list[NodePlace]:
    """``places``, sorted so that one before another bucket's launch comes behind the place of that launch."""
    left = {place.bucket.launch: place for place in places}
    turn: list[NodePlace] = []
    while left:
        # Each turn has the launches whose place does not hang on one that is still left.
        free = [place for place in left.values() if place.node not in left]
        if not free:
            one = next(iter(left.values()))
            raise PlanError(f"{one.where} is impossible: launches are placed before each other in a circle")
        turn += free
        for place in free:
            del left[place.bucket.launch]
    return turn
