"""A collective is left out, and who read what it brings reads what was to be sent."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.launches import can_drop, flights, left_out
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of one tensor for whose result something that is sent can stand in."""
    for flight in flights(seen):
        if can_drop(flight):
            yield Site(flight.launch.name, "is left out, and its wait", left_out(flight.launch, flight.waits))
