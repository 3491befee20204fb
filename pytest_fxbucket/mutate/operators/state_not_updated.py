"""A state, of an optimizer or a transformation, stays what it was."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import stale


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every state that is returned anew."""
    yield from stale(seen, "state")
