"""A launch, with its pack, stands as early as what it sends is there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.moving import earlier, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch that could be earlier, past compute or others."""
    for flight in flights(seen):
        if (move := earlier(seen, flight.launch)) is not None:
            yield Site(flight.launch.name, f"is launched before {move.before}", partial(make_moves, (move,)))
