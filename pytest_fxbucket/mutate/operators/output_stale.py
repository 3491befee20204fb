"""A loss, a gradient or a gathered parameter that is returned is another value of the same shape, made earlier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import expressions, give, interchangeable, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every such output that has something like it before it."""
    number = expressions(seen.graph)
    nodes = list(seen.graph.nodes)
    for place, node, value in results(seen, "loss", "grad", "whole", "unreduced"):
        own = {number[node]}
        maker = node
        while len(maker.all_input_nodes) == 1:  # what it was moved out of may be the same
            maker = maker.all_input_nodes[0]
            own.add(number[maker])
        earlier = reversed(nodes[: seen.place[node]])
        stale = next((one for one in earlier if interchangeable(one, node) and number[one] not in own), None)
        if stale is not None:
            how = f"is not returned as {value.role} {value.fqn}".rstrip() + f", but {stale.name}"
            yield Site(node.name, how, partial(give, {place: stale.name}))
