"""A state, of an optimizer or a transformation, stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, inputs, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every state that is returned anew."""
    before = inputs(seen, "state")
    for place, node, value in results(seen, "state"):
        old = before.get(value.fqn)
        if old is not None and old is not node:
            yield Site(node.name, f"is not returned: {value.fqn} stays as it was", partial(give, {place: old.name}))
