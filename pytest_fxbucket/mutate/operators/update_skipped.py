"""One parameter and its state are left as they were by the update."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import give, inputs, results


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every parameter that is returned anew."""
    before = inputs(seen, "param", "state")
    made = [one for one in results(seen, "param", "state") if one.value.fqn in before and one.node is not before[one.value.fqn]]
    for parameter in made:
        name = parameter.value.fqn
        if parameter.value.role == "param":
            own = {
                one.place: before[one.value.fqn].name
                for one in made
                if one.value.fqn.rpartition(".")[0] == name or one is parameter
            }
            yield Site(parameter.node.name, f"is not returned: {name} and its state stay as they were", partial(give, own))
