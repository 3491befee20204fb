"""A wait stands right behind its launch; the reductions of gradients are deferral_lost's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.launches import reductions
from pytest_fxbucket.mutate.moving import earlier, make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait behind whose launch others compute first, but for those of reductions of gradients."""
    others = {wait for flight in reductions(seen) for wait in flight.waits}
    for node in seen.graph.nodes:
        if is_wait(node) and node not in others and (move := earlier(seen, node)) is not None:
            yield Site(node.name, "waits right behind its launch", partial(make_moves, (move,)))
