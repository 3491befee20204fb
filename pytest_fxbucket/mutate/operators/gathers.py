"""Gathers of parameters left out, kept, or of other values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import fx

from pytest_fxbucket.graph.collectives import is_all_gather
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.mutate.launches import (
    LaunchInFlight,
    can_drop,
    flights,
    gathers,
    left_out,
    pieces_of,
    same_shape_and_dtype,
    split_of,
)
from pytest_fxbucket.mutate.moving import NodeMove, later, make_moves
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def gather_forgotten_on_a_rank(seen: SeenGraph) -> Iterator[Site]:
    """A gather is left out on the last rank alone; the others launch it.

    Every gather of parameters as one tensor.
    """
    for flight in gathers(seen):
        if can_drop(flight):
            change = left_out(flight.launch, flight.waits)
            yield Site(flight.launch.name, "is left out, and its wait", change, on_last_rank=True)


def gather_kept(seen: SeenGraph) -> Iterator[Site]:
    """A parameter is not gathered again in backward: what forward gathered is kept, and read.

    Every gather of which an earlier one has all members, cut alike.
    """
    had: dict[str, fx.Node] = {}
    for flight in gathers(seen):
        parts = _parts(flight)
        kept = {fqn: had[fqn] for fqn in parts if fqn in had and same_shape_and_dtype(had[fqn], parts[fqn])}
        if parts and len(kept) == len(parts) and set(flight.launch.users) == set(flight.waits):
            pairs = tuple((node.name, kept[fqn].name) for fqn, node in parts.items())
            how = "is left out, since an earlier one brought the same"
            yield Site(flight.launch.name, how, partial(_keep, pairs))
        # The earliest gather of a parameter counts, for a third one, too.
        had = parts | had


def _parts(flight: LaunchInFlight) -> dict[str, fx.Node]:
    """By FQN what is cut out of what arrives, or all of it; empty where that cannot be told."""
    assert flight.bucket is not None
    fqns, split = flight.bucket.fqns, split_of(flight)
    if split is None:
        return {fqns[0]: flight.waits[0]} if len(fqns) == len(flight.waits) == 1 else {}
    pieces = pieces_of(split)
    return {fqn: pieces[n] for n, fqn in enumerate(fqns)} if sorted(pieces) == list(range(len(fqns))) else {}


def _keep(pairs: tuple[tuple[str, str], ...], broken: BrokenGraph) -> None:
    for name, kept in pairs:
        broken[name].replace_all_uses_with(broken[kept])
    unread = [broken[name] for name, _ in pairs]
    for node in unread:  # grows: what only unread nodes read is unread
        if not node.users and node.op == "call_function":
            unread.extend(source for source in node.all_input_nodes if set(source.users) == {node})
            broken.graph.erase_node(node)


def gather_stale(seen: SeenGraph) -> Iterator[Site]:
    """A gather sends what a parameter was when the graph began, though it was updated before.

    Every gather of a parameter that is written in place before.
    """
    order = order_of(seen.graph)
    for flight in flights(seen):
        for node, source in flight.sources if is_all_gather(flight.launch) else ():
            begun = base(source)
            updated = any(writer < seen.place[flight.launch] for writer in order.writing(begun))
            if begun.op == "placeholder" and updated and same_shape_and_dtype(begun, source):
                how = f"sends what {begun.name} was when the graph began"
                yield Site(flight.launch.name, how, partial(_send_old, node.name, source.name, begun.name))


def _send_old(reader: str, source: str, begun: str, broken: BrokenGraph) -> None:
    first = next(node for node in broken.graph.nodes if node.op not in ("placeholder", "get_attr"))
    old = broken.before(first, torch.ops.aten.clone.default, broken[begun])
    broken[reader].replace_input_with(broken[source], old)


def prefetch_lost(seen: SeenGraph) -> Iterator[Site]:
    """The gathers of one entry are launched right before they are waited for.

    Every entry, in each direction and each round, whose gathers have compute before their waits.
    """
    moves: dict[tuple[object, ...], list[tuple[str, NodeMove]]] = {}
    for flight in gathers(seen):
        assert flight.bucket is not None
        if (move := later(seen, flight.launch)) is not None:
            # An entry has several gathers where dtypes or caps part it.
            entries = frozenset(seen.entry_of.get(fqn, fqn) for fqn in flight.bucket.fqns)
            key = (entries, flight.bucket.direction, flight.bucket.round)
            moves.setdefault(key, []).append((flight.launch.name, move))
    for found in moves.values():
        how = "and all gathers of its entry are launched right before their waits"
        yield Site(found[0][0], how, partial(make_moves, tuple(move for _, move in found)))
