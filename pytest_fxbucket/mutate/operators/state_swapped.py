"""Two states of equal shape are returned for each other."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import returned_for_each_other


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each state with the next one like it, as a mean with that of squares."""
    yield from returned_for_each_other(seen, "state")
