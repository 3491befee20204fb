"""A gather is left out on the last rank alone; the others launch it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import can_drop, drop, gathers, last_rank
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every gather of parameters as one tensor."""
    for flight in gathers(seen):
        if can_drop(flight):
            waits = tuple(wait.name for wait in flight.waits)
            how = "is left out, and its wait"
            yield Site(flight.launch.name, how, partial(drop, flight.launch.name, waits), last_rank(seen))
