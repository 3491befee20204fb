"""Where the compute of an entry starts: what first reads its gathers or makes its gradients; what each bucket hides behind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.compute import computed_before, computes, in_round
from pytest_fxbucket.graph.gradients import contributions
from pytest_fxbucket.graph.modules import OTHER_DIRECTION, direction_of
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Lives
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.targets import MergeTarget
    from pytest_fxbucket.step.roles import Direction

Computes = Sequence[tuple["fx.Node", "Direction", str]]
"""Compute with its direction and entry."""


class FirstComputes:
    """First compute of each entry, by direction."""

    def __init__(self, order: Order, buckets: Sequence[Merged], computes: Computes) -> None:
        self.order, self.buckets = order, buckets
        self.places: dict[str, list[int]] = {}
        self.of_entry: dict[tuple[str, str], list[int]] = {}
        for place, direction, entry in sorted((order.index[node], direction, entry) for node, direction, entry in computes):
            self.places.setdefault(direction, []).append(place)
            self.of_entry.setdefault((direction, entry), []).append(place)

    def of(self, direction: Direction, entry: str, where: str, number: int | None = None) -> int:
        """Index of the node where compute of ``entry`` starts, in its round (microbatch) ``number``; None: in its last.

        Raises :class:`PlanError`, naming ``where``, if none does.
        """
        own = [bucket for bucket in self.buckets if bucket.first.entry == entry]
        if not own:
            known = ", ".join(dict.fromkeys(bucket.first.entry for bucket in self.buckets)) or "none"
            raise PlanError(f"{where} names no bucket: entry {entry!r} has none; entries that have one: {known}")
        places = self._known(direction, entry, number)
        if not places:
            raise PlanError(f"{where} is impossible: nothing computes with {entry!r} in {direction}")
        return min(places)

    def start_of(self, direction: Direction, entry: str, number: int) -> int | None:
        """Index of the node where compute of ``entry`` starts in its round ``number``; None if none does."""
        return min(self._known(direction, entry, number), default=None)

    def turn(self, direction: Direction, place: int) -> int:
        """Index behind the last compute of the other direction before ``place``."""
        places = self.places.get(OTHER_DIRECTION[direction], [])
        before = bisect_left(places, place)
        return places[before - 1] + 1 if before else 0

    def _known(self, direction: Direction, entry: str, number: int | None) -> list[int]:
        others = self.places.get(OTHER_DIRECTION[direction], [])
        return in_round(self.of_entry.get((direction, entry), []), others, number)


def computes_of(targets: Iterable[MergeTarget], order: Order) -> Iterator[tuple[fx.Node, Direction, str]]:
    """Compute that reads what is gathered or makes what is reduced, in each microbatch, with its direction and entry.

    It is told by launches alone, before any is merged, where nobody said which inputs are parameters.
    """
    forward = [at for at, node in enumerate(order.nodes) if computes(node) and direction_of(node) == "forward"]
    for target in targets:
        for node, _ in labels_of([target]):
            parts = [node] if target.kind == "all_gather" else contributions(node, order.index, forward)
            yield from ((one, direction_of(one), target.entry) for one in parts if computes(one))


def gathered_lives(graph: fx.Graph, gathers: Iterable[tuple[fx.Node, Sequence[fx.Node], Sequence[MergeTarget]]]) -> Lives:
    """Lives of what all-gathers bring: (launch, results by member and part, members) of each; reductions are passed over."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    lives: Lives = []
    for launch, results, members in gathers:
        left = list(results)
        for member in members:
            own, left = left[: len(member.parts)], left[len(member.parts) :]
            if member.kind == "all_gather":
                last = max((place[node] for node in (*readers_of(own), *own)), default=place[launch])
                lives.append((place[launch], last, member.bytes))
    return lives


def readers_of(results: Sequence[fx.Node]) -> Iterable[fx.Node]:
    """Compute that reads ``results``, through what only moves data."""
    through = reached(results, lambda node: filter(_passes_on, node.users))
    return dict.fromkeys(user for node in through for user in node.users if user.op != "output" and not _passes_on(user))


def makers_of(launches: Sequence[fx.Node]) -> Iterable[fx.Node]:
    """Compute that makes what ``launches`` send, before it is moved, cast and packed."""
    sent = (source for launch in launches for source in launch.all_input_nodes)
    through = reached(sent, lambda node: node.all_input_nodes if _passes_on(node) else ())
    return [node for node in through if node.op != "placeholder" and not _passes_on(node)]


def _passes_on(node: fx.Node) -> bool:
    return node.op == "call_function" and not computes(node)


# What each bucket hides behind: the compute that stands between its launch and its wait in the graph that comes out.


Labels = list[tuple["fx.Node", str]]
"""Compute, and the entry or module whose it is."""


@dataclass(frozen=True, slots=True)
class OverlappedCompute:
    """Compute between a launch and its wait."""

    nodes: int
    of: tuple[str, ...]
    """Entries or modules, each once, in order; some compute may be nobody's."""


def labels_of(targets: Iterable[MergeTarget]) -> Labels:
    """The compute that reads what is gathered, or makes what is reduced. To be asked before launches are merged."""
    found: Labels = []
    for target in targets:
        nodes = readers_of(target.waits) if target.kind == "all_gather" else makers_of([target.launch])
        name = target.entry or _module(target)
        found += [(node, name) for node in nodes]
    return found


def overlapped(graph: fx.Graph, spans: Sequence[tuple[fx.Node, Sequence[fx.Node]]], labels: Labels) -> list[OverlappedCompute]:
    """What stands in each (launch, waits) of ``spans``. One walk over ``graph``."""
    before = computed_before(graph)
    timeline = _Timeline((before[node], name) for node, name in labels if node in before)
    found: list[OverlappedCompute] = []
    for launch, waits in spans:
        # Both count nodes that compute, so that their difference is how many stand in between.
        first, last = before[launch], min(before[wait] for wait in waits)
        found.append(OverlappedCompute(last - first, tuple(dict.fromkeys(timeline.between(first, last)))))
    return found


class _Timeline:
    """Named compute in order."""

    def __init__(self, named: Iterable[tuple[int, str]]) -> None:
        ordered = sorted(named)
        self._places = [place for place, _ in ordered]
        self._names = [name for _, name in ordered]
        self._next = list(range(1, len(ordered) + 1))
        """For each place where the next other name begins: a bucket may hide behind thousands of nodes of few names."""
        for index in range(len(ordered) - 2, -1, -1):
            if self._names[index] == self._names[index + 1]:
                self._next[index] = self._next[index + 1]

    def between(self, first: int, last: int) -> Iterator[str]:
        """Names from ``first`` up to, not with, ``last``; a name that stands there several times in a row is given once."""
        index, end = bisect_left(self._places, first), bisect_left(self._places, last)
        while index < end:
            yield self._names[index]
            index = self._next[index]


def _module(target: MergeTarget) -> str:
    """Name of a launch that has no entry: the module of its first parameter."""
    name = target.fqns[0] if target.fqns else target.launch.name
    return name.rpartition(".")[0] or name
