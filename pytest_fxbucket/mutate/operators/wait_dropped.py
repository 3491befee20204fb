"""A wait is left out, and what it waits for is read at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait."""
    for node in seen.graph.nodes:
        if is_wait(node):
            yield Site(node.name, "is left out", partial(_drop, node.name))


def _drop(name: str, broken: BrokenGraph) -> None:
    broken.bypass(broken[name], broken[name].all_input_nodes[0])
