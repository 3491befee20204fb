"""Two states of equal shape are returned for each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, next_alike, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each state with the next one like it, as a mean with that of squares."""
    place = {one.node: one.place for one in results(seen, "state")}
    for first, second in next_alike(seen, place):
        by = {place[first]: second.name, place[second]: first.name}
        yield Site(first.name, f"and {second.name} are returned for each other", partial(give, by))
