"""One parameter and its state are left as they were by the update."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, renewed


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every parameter that is returned anew."""
    made = list(renewed(seen, "param", "state"))
    for (_, node, parameter), _ in made:
        name = parameter.fqn
        if parameter.role == "param":
            # State is named below its parameter.
            own = {one.place: old.name for one, old in made if name in (one.value.fqn, one.value.fqn.rpartition(".")[0])}
            yield Site(node.name, f"is not returned: {name} and its state stay as they were", partial(give, own))
