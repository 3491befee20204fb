"""A number that is computed with, an epsilon or a scale, is another one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.arithmetic import another, numbers
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every number."""
    for node in seen.graph.nodes:
        for key, number in numbers(node):
            how = f"computes with {another(number)} for {number}"
            yield Site(node.name, how, partial(_change, node.name, key, another(number)))


def _change(name: str, key: int | str, number: int | float, broken: BrokenGraph) -> None:
    node = broken[name]
    if isinstance(key, int):
        node.update_arg(key, number)
    else:
        node.update_kwarg(key, number)
