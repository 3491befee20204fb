"""What each bucket hides behind: the compute that stands between its launch and its wait in the graph that comes out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.compute import computed_before
from pytest_fxbucket.passes.compute import makers_of, readers_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.targets import Target

Labels = list[tuple["fx.Node", str]]
"""Compute, and the entry or module whose it is."""


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Compute between a launch and its wait."""

    nodes: int
    of: tuple[str, ...]
    """Entries or modules, each once, in order; some compute may be nobody's."""


def labels_of(targets: Iterable[Target]) -> Labels:
    """The compute that reads what is gathered, or makes what is reduced. To be asked before launches are merged."""
    found: Labels = []
    for target in targets:
        nodes = readers_of(target.waits) if target.kind == "all_gather" else makers_of([target.launch])
        name = target.entry or _module(target)
        found += [(node, name) for node in nodes]
    return found


def overlapped(graph: fx.Graph, spans: Sequence[tuple[fx.Node, Sequence[fx.Node]]], labels: Labels) -> list[Overlapped]:
    """What stands in each (launch, waits) of ``spans``. One walk over ``graph``."""
    before = computed_before(graph)
    timeline = _Timeline((before[node], name) for node, name in labels if node in before)
    found: list[Overlapped] = []
    for launch, waits in spans:
        first, last = before[launch], min(before[wait] for wait in waits)
        found.append(Overlapped(last - first, tuple(dict.fromkeys(timeline.between(first, last)))))
    return found


class _Timeline:
    """Named compute in order."""

    def __init__(self, named: Iterable[tuple[int, str]]) -> None:
        ordered = sorted(named)
        self._places = [place for place, _ in ordered]
        self._names = [name for _, name in ordered]
        self._next = list(range(1, len(ordered) + 1))
        """For each where the next name begins."""
        for index in range(len(ordered) - 2, -1, -1):
            if self._names[index] == self._names[index + 1]:
                self._next[index] = self._next[index + 1]

    def between(self, first: int, last: int) -> Iterator[str]:
        """Names at ``first`` and behind it, before ``last``; the same again only behind another."""
        index, end = bisect_left(self._places, first), bisect_left(self._places, last)
        while index < end:
            yield self._names[index]
            index = self._next[index]


def _module(target: Target) -> str:
    """Where no entry says whose it is: the module of its first parameter."""
    name = target.fqns[0] if target.fqns else target.launch.name
    return name.rpartition(".")[0] or name
