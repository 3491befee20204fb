"""A wait, with what carries what it gives, stands right before who first computes with that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.moving import later, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait behind which others compute first."""
    for node in seen.graph.nodes:
        if is_wait(node) and (move := later(seen, node)) is not None:
            yield Site(node.name, f"waits right before {move.before}", partial(make_moves, (move,)))
