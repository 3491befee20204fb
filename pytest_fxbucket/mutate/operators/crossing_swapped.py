"""Two values of equal shape that go to another graph, or come from one, change places."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import swapped


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each output, and each input, that crosses, with the next one like it."""
    yield from swapped(seen, "crossing")
