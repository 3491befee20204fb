"""A launch is waited for a second time, by its last reader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait that is read."""
    for node in seen.graph.nodes:
        if is_wait(node) and node.users:
            last = max(node.users, key=seen.place.__getitem__)
            yield Site(node.name, f"is done again right before {last.name}", partial(_double, node.name, last.name))


def _double(name: str, reader: str, broken: BrokenGraph) -> None:
    wait = broken[name]
    again = broken.again(broken[reader].prev, wait)
    broken[reader].replace_input_with(wait, again)
