"""Expressions by number: equal numbers, equal expressions, whichever graph they were met in (hash-consing, A. P. Ershov, 1958).

An expression is a tuple: its operator's name, then numbers of what it is made of, and constants. Every int in it, at any depth,
is the number of another expression; all else that is an integer stands in a :class:`Const` or a :class:`Where`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

UNDEFINED, ZERO = 0, 1
"""Numbers of what memory holds that nobody wrote, and of zeros; the same as in :mod:`pytest_fxbucket.graph.contents`."""
Key = tuple[Any, ...]
LIST = "["
"""What an expression that is a list of others begins with."""


class Const(NamedTuple):
    """A constant: two are equal only if they are of one type and print the same, so 0.0 is neither -0.0 nor 0."""

    type: str
    text: str


class Where(NamedTuple):
    """Which bytes of a source lie where in a value."""

    offset: int
    length: int
    rank: int
    """Index of the rank that holds them, -1: this one."""
    start: int
    """In the source."""
    form: int
    """What dtype the source has there."""
    times: int = 1
    """How often this comes in a row, each time of the next rank."""


class Table:
    """Every expression of the graphs that are compared."""

    def __init__(self) -> None:
        self.keys: list[Key] = [("undefined",), ("zeros",)]
        self._numbers: dict[Key, int] = {key: number for number, key in enumerate(self.keys)}
        self.facts: dict[int, Any] = {}
        """A fake value of some expressions: of the node that it was met at first, so of the graph before if that has it."""
        self.left: dict[int, str] = {}
        """Expressions of what is not followed, each with why."""

    def __len__(self) -> int:
        return len(self.keys)

    def number(self, key: Key) -> int:
        """The number of the expression ``key``."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return found

    def parts(self, number: int) -> list[int]:
        """What the expression ``number`` is made of, in order."""
        return list(_numbers(self.keys[number]))

    def within(self, numbers: Iterable[int]) -> set[int]:
        """``numbers``, and all that they are made of."""
        found = set(numbers)
        queue = list(found)
        while queue:
            fresh = [part for part in self.parts(queue.pop()) if part not in found]
            found.update(fresh)
            queue += fresh
        return found


_consts: dict[tuple[type, Any], Const] = {}


def const(value: Any) -> Const:
    """``value``, which is no node and has none in it, as a constant. Raises TypeError for what has no value that compares."""
    kind = type(value)
    if kind not in PLAIN:  # 0.0 and -0.0 are equal, and a NaN is not equal to itself
        text = repr(value)
        if " at 0x" in text:
            raise TypeError(f"a {kind.__name__} among its arguments has no value that can be compared")
        return Const(kind.__name__, text)
    found = _consts.get((kind, value))
    if found is None:
        found = _consts[kind, value] = Const(kind.__name__, repr(value))
    return found


PLAIN = frozenset({type(None), type(...), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of constants of which equal ones are the same."""


def _numbers(key: Key) -> Iterator[int]:
    for item in key:
        if type(item) is int:
            yield item
        elif type(item) is tuple:
            yield from _numbers(item)
