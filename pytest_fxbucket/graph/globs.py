"""Which modules a glob names: ``layers.*.attention``, ``layers.[0-3]``, ``**.wq``."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_fxbucket.graph.tree import Tree

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
