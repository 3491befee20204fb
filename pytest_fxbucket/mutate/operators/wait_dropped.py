"""A wait is left out, and what it waits for is read at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import leave_out


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait."""
    for node in seen.graph.nodes:
        if is_wait(node):
            yield Site(node.name, "is left out", partial(leave_out, node.name))
