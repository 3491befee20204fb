"""Modules and nodes found by glob, direction and kind; and the errors for a module that a graph does not have."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import GraphError, NoModuleError
from pytest_fxbucket.graph.collectives import ROWS
from pytest_fxbucket.words import nearest, some

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from pytest_fxbucket.graph_view.tree import ModuleRun, Tree

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_DOT = re.compile(r"\.(?![^\[]*\])")


def is_glob(name: str) -> bool:
    """Whether ``name`` is more than one module's FQN."""
    return "*" in name or "?" in name or _RANGE.search(name) is not None


def matching(tree: Tree, number: int, glob: str) -> list[int]:
    """Modules below ``number`` that ``glob`` names, outer ones first, else in order of registration or of the graph.

    A part of it is a name, with ``*`` and ``?`` for any characters in it, ``[0-31]`` for the numbers from 0 to 31 as in a plan,
    or ``**`` for any number of names.
    """
    # A dict is an ordered set: with ``**`` several ways may lead to one module.
    reached = {number: None}
    for part in _DOT.split(glob):
        if part == "**":
            reached = {below: None for start in reached for below in tree.inward(start)}
            continue
        fits = _fits(part)
        reached = {child: None for start in reached for name, child in tree.children[start].items() if fits(name)}
    return list(reached)


def _fits(part: str) -> Callable[[str], bool]:
    bounds = _RANGE.fullmatch(part)
    if bounds is not None:
        first, last = int(bounds[1]), int(bounds[2])
        return lambda name: name.isdigit() and first <= int(name) <= last
    if not is_glob(part):
        return part.__eq__
    pattern = re.compile(translate(part))
    return lambda name: pattern.match(name) is not None


# Errors for a module that a graph does not have. The message is made only when somebody reads it, which ``hasattr`` never does.


class MissingModuleError(NoModuleError):
    """The module ``asked``, a name or an index, that the module ``number`` of ``tree`` does not have."""

    def __init__(self, tree: Tree, number: int, asked: object) -> None:
        super().__init__(tree, number, asked)
        self.tree, self.number, self.asked = tree, number, asked

    def __str__(self) -> str:
        tree, number = self.tree, self.number
        names = list(tree.children[number])
        where = ".".join(tree.path(number)) or "the graph"
        has = f"its modules are {some(names, 6)}" if names else "it has no modules in it"
        if isinstance(self.asked, int):
            return f"{where} has no module of index {self.asked}, but {len(names)} modules; {has}"
        if not isinstance(self.asked, str):
            return f"{where} is asked for a module by a {type(self.asked).__name__}, expected its name or its index"
        if is_glob(self.asked):
            return f"{where} has no module called {self.asked!r}; ask find() for what a glob names"
        below = [".".join(tree.path(n)[len(tree.path(number)) :]) for n in tree.inward(number)[1:]]
        near = nearest(self.asked, below if "." in self.asked else names) or nearest(self.asked, below)
        return f"{where} has no module {self.asked!r}{near or f'; {has}'}"


class NoKeyError(MissingModuleError, KeyError):
    """Asked for with brackets, by name."""


class NoIndexError(MissingModuleError, IndexError):
    """Asked for with brackets, by index."""


class NoAttributeError(MissingModuleError, AttributeError):
    """Asked for as an attribute."""


# Nodes of a module by direction and kind.


KINDS = ("compute", "wait", *ROWS)
DIRECTIONS = ("forward", "backward")


def chosen(
    tree: Tree, number: int, direction: str | None = None, kind: str | None = None, *, own: bool = False
) -> list[tuple[ModuleRun, int]]:
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
    """Nodes of the code that calls the module ``number``: the own nodes of the modules around it."""
    outward = set(tree.outward(number)) - {number}
    return [
        node
        for run in tree.runs
        if outward.issuperset(run.innermost)
        for node, mark in zip(run.nodes, tree.marked(run), strict=True)
        if mark[1] and direction in (None, mark[0])
    ]
