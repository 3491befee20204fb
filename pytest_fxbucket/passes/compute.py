"""Where the compute of an entry starts: the first node that reads what its all-gathers brought, or makes its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.modules import direction_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.live import Lives
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.graph.reading import Direction
    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.targets import Target


Direct = Mapping[tuple["Direction", str], Sequence["fx.Node"]]
"""By direction and entry: compute that reads a parameter which no launch brought."""


class Starts:
    """First compute of each entry, by direction."""

    def __init__(self, order: Order, buckets: Sequence[Merged], direct: Direct) -> None:
        self.order, self.buckets, self.direct = order, buckets, direct

    def of(self, direction: Direction, entry: str, where: str, round: int | None = None) -> int:
        """Index of the node where compute of ``entry`` starts, in its round number ``round``; None: in the last that it has.

        Raises :class:`PlanError`, naming ``where``, if none does.
        """
        own = [bucket for bucket in self.buckets if bucket.first.entry == entry]
        if round is None:
            round = max((bucket.first.round for bucket in own if bucket.first.kind == "all_gather"), default=0)
        if not own:
            known = ", ".join(dict.fromkeys(bucket.first.entry for bucket in self.buckets)) or "none"
            raise PlanError(f"{where} names no bucket: entry {entry!r} has none; entries that have one: {known}")
        here = [bucket for bucket in own if bucket.first.direction == direction]
        reductions = [bucket.launch for bucket in here if bucket.first.kind != "all_gather"]
        gathers = [bucket for bucket in own if bucket.first.kind == "all_gather" and bucket.first.round == round]
        fresh = [bucket for bucket in gathers if bucket in here]
        places = [self.order.index[node] for bucket in fresh for node in readers_of(bucket.results)]
        places += [self.order.index[node] for launch in reductions for node in makers_of([launch])]
        if not fresh:
            kept = [node for bucket in gathers for node in readers_of(bucket.results)]
            places += [self.order.index[node] for node in kept if direction_of(node) == direction]
        if round == 0:
            places += [self.order.index[node] for node in self.direct.get((direction, entry), ())]
        if not places:
            raise PlanError(f"{where} is impossible: nothing computes with {entry!r} in {direction}")
        return min(places)


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
