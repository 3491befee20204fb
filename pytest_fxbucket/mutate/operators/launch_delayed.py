"""A launch stands right before its wait; the gathers of parameters are prefetch_lost's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import flights, gathers
from pytest_fxbucket.mutate.moving import later, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch behind which others compute before its wait, but for those that gather parameters."""
    others = {flight.launch for flight in gathers(seen)}
    for flight in flights(seen):
        if flight.launch not in others and (move := later(seen, flight.launch)) is not None:
            yield Site(flight.launch.name, "is launched right before its wait", partial(make_moves, (move,)))
