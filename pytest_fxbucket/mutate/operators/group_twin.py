"""A collective is launched on a process group of its own of the same ranks, or on the one that others share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.compat.c10d import twin_name, untwinned
from pytest_fxbucket.mutate.launches import flights, regroup
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch."""
    for flight in flights(seen):
        other = twin_name(flight.group) if flight.group == untwinned(flight.group) else untwinned(flight.group)
        yield Site(flight.launch.name, f"is launched on {other}", partial(regroup, flight.launch.name, other))
