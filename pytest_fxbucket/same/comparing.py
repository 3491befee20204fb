"""Two graphs, number by number: what stands for another expression, and what is computed for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.same.table import Table
from pytest_fxbucket.same.walk import Walk

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Pair:
    """What something stands for in the graph before and after."""

    name: str
    """For people."""
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an expression parts from what it was."""

    before: int
    after: int
    node: fx.Node | None
    """Of the graph after, at which that expression is met first."""
    names: tuple[str, ...]
    """Of what stands for it, for people."""


@dataclass(frozen=True, slots=True)
class Waste:
    """What is computed and changes no value."""

    node: fx.Node
    number: int
    times: tuple[int, int]
    """How often it is computed before and after."""


def differences(table: Table, after: Walk, pairs: Sequence[Pair]) -> list[Difference]:
    """Where those of ``pairs`` part that are not equal, the first in the order of the graph after first."""
    place = {node: index for index, node in enumerate(after.nodes)}
    found: dict[tuple[int, int], list[str]] = {}
    for pair in pairs:
        if pair.before != pair.after:
            for parting in _partings(table, pair.before, pair.after):
                found.setdefault(parting, []).append(pair.name)
    made = [Difference(b, a, after.node_of.get(a), tuple(names)) for (b, a), names in found.items()]
    return sorted(made, key=lambda one: len(place) if one.node is None else place[one.node])


def _partings(table: Table, before: int, after: int) -> Iterator[tuple[int, int]]:
    """The innermost pairs of expressions that differ in themselves, not only in what they are made of."""
    queue, met = [(before, after)], {(before, after)}
    while queue:
        one, other = queue.pop()
        inner = _inner(table, one, other)
        if not inner:
            yield one, other
        for pair in inner:
            if pair not in met:
                met.add(pair)
                queue.append(pair)


def _inner(table: Table, one: int, other: int) -> list[tuple[int, int]]:
    """Pairs of parts that differ, of two expressions that are alike in all but these; none if they are not alike."""
    parts, others = table.parts(one), table.parts(other)
    if len(parts) != len(others) or _shape(table, one) != _shape(table, other):
        return []
    return [(a, b) for a, b in zip(parts, others, strict=True) if a != b]


def _shape(table: Table, number: int) -> object:
    """An expression without what it is made of."""

    def blank(key: object) -> object:
        if type(key) is int:
            return None
        return tuple(map(blank, key)) if type(key) is tuple else key

    return blank(table.keys[number])


def waste(before: Walk, after: Walk, read: set[int]) -> list[Waste]:
    """What the graph after computes more often than the one before; ``read``: all that its outputs are made of."""
    more = [n for n, count in after.computed.items() if count > before.computed.get(n, 0)]
    return [
        Waste(after.node_of[n], n, (before.computed.get(n, 0), after.computed[n]))
        for n in more
        if before.computed.get(n, 0) or n not in read
    ]


def crosswise(sent: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]) -> tuple[tuple[int, ...], int] | None:
    """The first group, and which of its launches, in which ranks send what does not belong together; None if there is none."""
    groups = dict.fromkeys(members for launches in sent.values() for members, _ in launches)
    for group in groups:
        rows = [[n for members, n in launches if members == group] for rank, launches in sent.items() if rank in group]
        for place, numbers in enumerate(zip(*rows, strict=False)):
            if len(set(numbers)) > 1:
                return group, place
    return None
