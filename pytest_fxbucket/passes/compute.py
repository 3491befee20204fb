"""Where the compute of an entry starts: the first node that reads what its all-gathers brought, or makes its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.microbatches import in_rounds, of_round
from pytest_fxbucket.graph.modules import direction_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.live import Lives
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.targets import Target


Computes = Sequence[tuple["fx.Node", "Direction", str]]
"""Compute with its direction and entry."""


class Starts:
    """First compute of each entry, by direction; ``computes`` is in order, empty if nobody knows."""

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
        places = self._known(direction, entry, number) if self.places else self._told_by(own, direction)
        if not places:
            raise PlanError(f"{where} is impossible: nothing computes with {entry!r} in {direction}")
        return min(places)

    def found(self, direction: Direction, entry: str, number: int) -> int | None:
        """Index of the node where compute of ``entry`` starts in its round ``number``; None if none does, or nobody knows."""
        if self.places:
            return min(self._known(direction, entry, number), default=None)
        own = [bucket for bucket in self.buckets if bucket.first.entry == entry]
        several = any(bucket.first.round for bucket in own)  # whose compute cannot be told apart
        return min(self._told_by(own, direction), default=None) if not several else None

    def _known(self, direction: Direction, entry: str, number: int | None) -> list[int]:
        others = self.places.get("backward" if direction == "forward" else "forward", [])
        return of_round(in_rounds(self.of_entry.get((direction, entry), []), others), number)

    def _told_by(self, own: Sequence[Merged], direction: Direction) -> list[int]:
        """Compute that reads what the buckets ``own`` gather, or makes what they reduce; all rounds as one."""
        here = [bucket for bucket in own if bucket.first.direction == direction]
        gathers = [bucket for bucket in here if bucket.first.kind == "all_gather"]
        places = [self.order.index[node] for bucket in gathers for node in readers_of(bucket.results)]
        places += [self.order.index[n] for bucket in here if bucket not in gathers for n in makers_of([bucket.launch])]
        if not gathers:
            kept = [node for bucket in own if bucket.first.kind == "all_gather" for node in readers_of(bucket.results)]
            places += [self.order.index[node] for node in kept if direction_of(node) == direction]
        return places


def gathered_lives(graph: fx.Graph, gathers: Iterable[tuple[fx.Node, Sequence[fx.Node], Sequence[Target]]]) -> Lives:
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
    queue = list(dict.fromkeys(results))
    seen = set(queue)
    for node in queue:
        for user in node.users:
            if not _passes_on(user):
                if user.op != "output":
                    yield user
            elif user not in seen:
                seen.add(user)
                queue.append(user)


def makers_of(launches: Sequence[fx.Node]) -> Iterable[fx.Node]:
    """Compute that makes what ``launches`` send, before it is moved, cast and packed."""
    queue = [source for launch in launches for source in launch.all_input_nodes]
    seen = set(queue)
    for node in queue:
        if not _passes_on(node):
            if node.op != "placeholder":
                yield node
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        queue.extend(fresh)


def _passes_on(node: fx.Node) -> bool:
    return node.op == "call_function" and not computes(node)
