"""Two returned gradients of equal shape change places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, next_alike, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each gradient, reduced or not yet, with the next one like it."""
    place = {one.node: one.place for one in results(seen, "grad", "unreduced")}
    for first, second in next_alike(seen, place):
        by = {place[first]: second.name, place[second]: first.name}
        yield Site(first.name, f"and {second.name} are returned for each other", partial(give, by))
