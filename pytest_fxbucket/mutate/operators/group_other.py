"""A collective is launched on another process group of as many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.mutate.launches import flights, regroup
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch, for each group of the mesh of as many ranks as its own has, others than those."""
    groups = seen.mesh.groups(seen.rank)
    for flight in flights(seen):
        own = seen.passed.members.get(flight.group, groups.get(untwinned(flight.group)))
        for name, ranks in groups.items():
            if own is not None and len(ranks) == len(own) and set(ranks) != set(own):
                yield Site(flight.launch.name, f"is launched on {name}", partial(regroup, flight.launch.name, name))
