"""What is handed to the next iteration is what was handed to this one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import Form, SeenGraph, Site
from pytest_fxbucket.mutate.values import give, interchangeable, renewed

FORM: Form = "final"


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every value that is carried in and out under one name."""
    for (place, node, value), old in renewed(seen, "carried"):
        if interchangeable(old, node):
            yield Site(
                node.name, f"is not handed on as {value.fqn}, but {old.name}, which came", partial(give, {place: old.name})
            )
