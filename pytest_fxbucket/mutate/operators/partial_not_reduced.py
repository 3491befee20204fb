"""A sum over ranks of what is no gradient, as tensor parallelism needs it, is left out: each rank goes on with its part."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.graph.collectives import waits_of
from pytest_fxbucket.mutate.arithmetic import other_sums
from pytest_fxbucket.mutate.launches import left_out
from pytest_fxbucket.mutate.operator import SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every all-reduce that has no parameter's gradient, but for those of norms."""
    for launch, of_norms in other_sums(seen):
        if not of_norms:
            yield Site(launch.name, "is left out", left_out(launch, waits_of(launch)))
