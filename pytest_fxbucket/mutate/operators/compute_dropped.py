"""A sum is one of its sides, or a scaling by a number is left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.arithmetic import scaled, sides
from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import read_instead


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every side of every sum of two tensors, every product with a number."""
    for node in seen.graph.nodes:
        for side in sides(node):
            yield Site(node.name, f"is only {side.name}", partial(read_instead, node.name, side.name))
        if (source := scaled(node)) is not None:
            yield Site(node.name, "is left out", partial(read_instead, node.name, source.name))
