"""A collective is left out, and who read what it brings reads what was to be sent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import can_drop, drop, flights
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of one tensor for whose result something that is sent can stand in."""
    for flight in flights(seen):
        if can_drop(flight):
            waits = tuple(wait.name for wait in flight.waits)
            yield Site(flight.launch.name, "is left out, and its wait", partial(drop, flight.launch.name, waits))
