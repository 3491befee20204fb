"""Two launches of one process group trade places, on the last rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.launches import trades
from pytest_fxbucket.mutate.moving import make_moves
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every two that follow each other in their group, where what they need and who reads them allows it."""
    for first, second, move in trades(seen):
        yield Site(first, f"trades places with {second}", partial(make_moves, (move,)), on_last_rank=True)
