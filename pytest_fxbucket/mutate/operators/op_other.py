"""A reduction sums where it should average, or the other way round, or takes the largest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import argument
from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.passes.new_nodes import set_argument

_OTHERS = {"avg": ("sum", "max"), "sum": ("avg", "max")}


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every sum and every average, each of the other two."""
    for flight in flights(seen):
        op = str(argument(flight.launch, "reduce_op"))
        for other in _OTHERS.get(op, ()):
            yield Site(flight.launch.name, f"reduces by {other}, not by {op}", partial(_reduce_by, flight.launch.name, other))


def _reduce_by(name: str, op: str, broken: BrokenGraph) -> None:
    set_argument(broken[name], "reduce_op", op)
