"""A reduction of gradients is waited for right behind its launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import reductions
from pytest_fxbucket.mutate.moving import earlier, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every reduction of gradients behind whose launch others compute before the wait."""
    for flight in reductions(seen):
        moves = tuple(move for wait in flight.waits if (move := earlier(seen, wait)) is not None)
        if moves:
            yield Site(flight.launch.name, "is waited for right behind its launch", partial(make_moves, moves))
