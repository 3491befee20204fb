"""A gather is left out on the last rank alone; the others launch it."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.launches import can_drop, gathers, left_out
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every gather of parameters as one tensor."""
    for flight in gathers(seen):
        if can_drop(flight):
            change = left_out(flight.launch, flight.waits)
            yield Site(flight.launch.name, "is left out, and its wait", change, on_last_rank=True)
