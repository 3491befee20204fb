"""Nodes of a module by direction and kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.units import nearest

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.tree import Run, Tree

KINDS = ("compute", "wait", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "other")
DIRECTIONS = ("forward", "backward")


def chosen(
    tree: Tree, number: int, direction: str | None = None, kind: str | None = None, *, own: bool = False
) -> list[tuple[Run, int]]:
    """Nodes that ran in the module ``number``, as runs and places in them, in graph order; ``own``: in no other module.

    Raises :class:`GraphError` for an unknown direction or kind.
    """
    for what, asked, known in (("direction", direction, DIRECTIONS), ("kind", kind, KINDS)):
        if asked is not None and asked not in known:
            raise GraphError(f"{asked!r} is no {what} of a node; known are {', '.join(known)}{nearest(str(asked), [*known])}")
    runs = [tree.runs[i] for i in tree.runs_of[number]]
    found = [
        (place, n, i)
        for n, run in enumerate(runs)
        if not own or number in run.innermost
        for i, (mark, place) in enumerate(zip(tree.marked(run), tree.placed(run), strict=True))
        if mark[1] and direction in (None, mark[0]) and kind in (None, mark[1])
    ]
    return [(runs[n], i) for _, n, i in sorted(found)]


def around(tree: Tree, number: int, direction: str | None) -> list[fx.Node]:
    """Nodes of the code that calls the module ``number``: those that are the own nodes of modules around it."""
    outward = set(tree.outward(number)) - {number}
    return [
        node
        for run in tree.runs
        if outward.issuperset(run.innermost)
        for node, mark in zip(run.nodes, tree.marked(run), strict=True)
        if mark[1] and direction in (None, mark[0])
    ]
