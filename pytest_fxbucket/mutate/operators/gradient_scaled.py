"""A gradient is twice as large."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import results, scale


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every returned gradient, reduced or not yet."""
    for _, node, value in results(seen, "grad", "unreduced"):
        yield Site(node.name, f"is doubled, the gradient of {value.fqn}", partial(scale, node.name, 2.0))
