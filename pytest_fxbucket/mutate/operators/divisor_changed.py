"""A factor right before or behind a reduction is left out, or done twice; where there is none, what it brings is halved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import fx

from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.launches import LaunchInFlight, reductions
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import leave_out, put_behind, scale


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every reduction of gradients, for each factor right before and behind it."""
    for flight in reductions(seen):
        factors = sorted(_factors(flight), key=seen.place.__getitem__)
        for node in factors:
            yield Site(node.name, "is left out", partial(leave_out, node.name))
            yield Site(node.name, "is done twice", partial(_repeat, node.name))
        if not factors:
            for wait in flight.waits:
                yield Site(wait.name, "gives half of what arrived", partial(scale, wait.name, 0.5))


def _factors(flight: LaunchInFlight) -> set[fx.Node]:
    """Products with a number that are sent, or that read what arrived, through what only carries it."""
    read = {user for node in flight.arrived for user in node.users}
    return {node for node in read.union(source for _, source in flight.sources) if _is_factor(node)}


def _is_factor(node: fx.Node) -> bool:
    named = operator_name(node) in ("aten::mul", "aten::div") and len(node.args) == 2
    return named and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], (int, float))


def _repeat(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    put_behind(node, broken.again(node, node, node, node.args[1]))
