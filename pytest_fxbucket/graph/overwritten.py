"""Who reads what of a parameter, a state or a buffer that the graph writes in place: the old value or the new one.

An all-gather reads its input until its wait, unless it sends a copy. A launch is known by what it gathers, compute by the name
of its node: passes give packs and launches other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import is_view

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value
    from pytest_fxbucket.graph.buckets import Bucket
    from pytest_fxbucket.graph.order import Order


@dataclass(frozen=True, slots=True)
class Read:
    """One reader of an input that is written in place."""

    fqn: str
    reader: str
    """``all_gather in backward``, ``all_gather in forward (2)``, or the name of a node."""
    writers: tuple[str, ...]
    """Nodes that have written it when the reader is done, in order; empty: it reads the value that the step began with."""


def reads_of_written(order: Order, inputs: Sequence[Value], buckets: Sequence[Bucket]) -> Iterator[Read]:
    """Every reader and writer of each input that is written in place, in order of the inputs, then of the graph."""
    placeholders = [node for node in order.nodes if node.op == "placeholder"]
    direction = {bucket.node: bucket.direction for bucket in buckets}
    for node, value in zip(placeholders, inputs, strict=True):
        writers = order.writing(node)
        if writers:
            yield from _reads(order, node, value.fqn, writers, direction)


def _reads(order: Order, node: fx.Node, fqn: str, writers: Sequence[int], direction: Mapping[str, str]) -> Iterator[Read]:
    counts: dict[str, int] = {}
    readers = sorted({index for storage in order.storages(node) for index in order.readers(storage)}.union(writers))
    for index in readers:
        reader = order.nodes[index]
        if reader.op == "output" or is_view(reader) or collectives.is_wait(reader):
            continue
        end = _end(order, reader)
        seen = tuple(order.nodes[writer].name for writer in writers if writer < end)
        for name in _names(reader, direction):
            counts[name] = counts.get(name, 0) + 1
            yield Read(fqn, name if counts[name] == 1 else f"{name} ({counts[name]})", seen)


def _end(order: Order, reader: fx.Node) -> int:
    """Where ``reader`` is done with what it reads."""
    if collectives.launch_kind(reader) is None:
        return order.index[reader]
    return max((order.index[wait] for wait in collectives.waits_of(reader)), default=len(order.nodes))


def _names(reader: fx.Node, direction: Mapping[str, str]) -> list[str]:
    """What ``reader`` is known by: launches that it is, or copies for, or its own name."""
    queue, seen, found = [reader], {reader}, list[str]()
    for node in queue:
        kind = collectives.launch_kind(node)
        if kind is not None:
            found.append(f"{kind} in {direction.get(node.name, 'forward')}")
            continue
        fresh = [user for user in node.users if user not in seen and _goes_on(node)]
        seen.update(fresh)
        queue.extend(user for user in fresh if collectives.launch_kind(user) is not None or _goes_on(user))
    return found or [reader.name]


def _goes_on(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node) and not collectives.is_wait(node)
