"""One reader of what a wait gives reads the launch itself, before the wait where it can."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every wait that is read: its first reader."""
    for node in seen.graph.nodes:
        readers = [user for user in node.users if user.op != "output"] if is_wait(node) else []
        if readers:
            first = min(readers, key=seen.place.__getitem__)
            early = all(seen.place[other] < seen.place[node] for other in first.all_input_nodes if other is not node)
            where = "before it is done" if early else "without it"
            yield Site(node.name, f"is not waited for by {first.name}, {where}", partial(_read, node.name, first.name, early))


def _read(name: str, reader: str, early: bool, broken: BrokenGraph) -> None:
    wait = broken[name]
    broken[reader].replace_input_with(wait, wait.all_input_nodes[0])
    if early:
        wait.prepend(broken[reader])
