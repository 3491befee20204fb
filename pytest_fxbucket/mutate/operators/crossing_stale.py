"""What goes to another graph is what came from one, or was given, of equal shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, inputs, interchangeable, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every output that crosses, if an input that crosses is like it."""
    came = list(inputs(seen, "crossing").values())
    for place, node, value in results(seen, "crossing"):
        old = next((one for one in came if one is not node and interchangeable(one, node)), None)
        if old is not None:
            yield Site(node.name, f"is not sent as {value.fqn}, but {old.name}, which came", partial(give, {place: old.name}))
