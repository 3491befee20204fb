"""A side of a sum is added twice, or a scaling by a number is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.arithmetic import scaled, sides
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import put_behind


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every sum of two tensors, every product with a number."""
    for node in seen.graph.nodes:
        if sides(node):
            first, second = sides(node)
            yield Site(node.name, f"adds {second.name} twice", partial(_again, node.name, first.name))
        if (source := scaled(node)) is not None:
            yield Site(node.name, "is done twice", partial(_again, node.name, source.name))


def _again(name: str, instead: str, broken: BrokenGraph) -> None:
    node = broken[name]
    assert callable(node.target)
    args = [node if arg is broken[instead] else arg for arg in node.args]
    put_behind(node, broken.behind(node, node.target, *args, **node.kwargs))
