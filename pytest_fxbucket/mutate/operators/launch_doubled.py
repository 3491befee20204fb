"""The same is launched a second time, and waited for; nobody reads what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch of one tensor that is waited for."""
    for flight in flights(seen):
        if flight.sent is not None and flight.waits:
            change = partial(_double, flight.launch.name, flight.waits[0].name)
            yield Site(flight.launch.name, "is launched again, and waited for behind its own wait", change)


def _double(name: str, wait: str, broken: BrokenGraph) -> None:
    launch, first = broken[name], broken[wait]
    again = broken.again(launch, launch)
    broken.again(first, first, again)
