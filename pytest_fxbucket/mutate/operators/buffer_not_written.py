"""What is written into a buffer or a parameter is left out, or the buffer that is returned is the one that was given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.storages import base
from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import read_instead, stale, writes


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every write whose result, if it has one, is what it wrote; every buffer that is returned anew."""
    for writer, target in writes(seen):
        yield Site(
            writer.name, f"is left out, which writes {base(target).name}", partial(read_instead, writer.name, target.name)
        )
    yield from stale(seen, "buffer", "held")
