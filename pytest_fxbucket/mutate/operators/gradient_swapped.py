"""Two returned gradients of equal shape change places."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import returned_for_each_other


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each gradient, reduced or not yet, with the next one like it."""
    yield from returned_for_each_other(seen, "grad", "unreduced")
