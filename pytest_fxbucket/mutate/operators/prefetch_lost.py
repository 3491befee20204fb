"""The gathers of one entry are launched right before they are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import gathers
from pytest_fxbucket.mutate.moving import NodeMove, later, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every entry, in each direction and each round, whose gathers have compute before their waits."""
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
