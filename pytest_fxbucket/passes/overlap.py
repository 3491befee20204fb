"""Reorders launches and waits so that communication hides behind compute; only what must move moves.

All-gathers, each direction and round (microbatch) on its own: a stage's gathers are launched before the stage ``prefetch``
ahead of it is waited for, but not before as many others are, of whatever round, that are used before it; in backward an entry
that stayed gathered is a stage, too, which begins where it computes.
Reductions: a stage is waited for behind the launches of the next one. A stage is an entry: its buckets are needed together;
by size, each bucket is one. What the user placed by hand (``launch_at``, ``wait_before``) stands there instead. Updates of
parameters follow the waits, where that is asked for (:mod:`pytest_fxbucket.passes.ready`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import REDUCTIONS, communicates
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.arrange import arranged, blocker, pull_up, readers, readers_before, relink
from pytest_fxbucket.passes.compute import Computes, Starts
from pytest_fxbucket.passes.ready import hoist_updates, kept_pairs, waits_of, why_late
from pytest_fxbucket.passes.reordered import Reordered
from pytest_fxbucket.passes.targets import LeftAlone

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.plan.tables import Overlap
    from pytest_fxbucket.step.roles import Direction

Stage = list["Merged"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def reorder(
    graph: fx.Graph, buckets: Sequence[Merged], rules: Overlap, computes: Computes = (), updating: Iterable[fx.Node] = ()
) -> Reordered:
    """Move launches and waits of ``buckets`` in ``graph``, with what they need and who reads them.

    ``computes`` is compute by direction and entry, as far as that is known; ``updating`` are the optimizer's nodes, which move
    if the rules say so. Raises :class:`PlanError` for a place by hand that names no bucket, or that cannot be had.
    """
    moves = _Moves(graph, buckets, rules, computes)
    for direction in DIRECTIONS:
        moves.place_gathers(direction)
        moves.place_reductions(direction)
    for direction in DIRECTIONS:
        moves.prefetch(direction)
    if rules.defer_reduce:
        moves.defer()
    if rules.updates == "ready":
        moves.update_when_ready(updating)
    if moves.wishes != list(map(float, range(len(moves.order.nodes)))):
        edges = dict(enumerate(moves.order.before))
        relink(graph, [moves.order.nodes[index] for index in arranged(edges, moves.wishes)])
    return Reordered(tuple(moves.left), tuple(moves.kept))


class _Moves:
    """Wishes of all nodes, from one look at the graph before anything moves."""

    def __init__(self, graph: fx.Graph, buckets: Sequence[Merged], rules: Overlap, computes: Computes = ()) -> None:
        self.order, self.buckets, self.rules = order_of(graph), buckets, rules
        self.after = readers(self.order)
        self.starts = Starts(self.order, buckets, computes)
        self.wishes = [float(index) for index in range(len(self.order.nodes))]
        self.reductions_of: dict[str, list[Merged]] = {}
        for bucket in self._reductions():
            if bucket.first.entry:
                self.reductions_of.setdefault(bucket.first.entry, []).append(bucket)
        self.by_hand: set[fx.Node] = set()
        """Launches and waits that the user placed."""
        self.left: list[LeftAlone] = []
        self.kept: list[tuple[fx.Node, fx.Node]] = []

    def prefetch(self, direction: Direction) -> None:
        """Launch each stage's gathers ``prefetch`` stages ahead, those of a round's first together; 0 leaves them."""
        rounds: dict[int, list[Merged]] = {}
        for bucket in self._gathers(direction) if self.rules.prefetch else []:
            rounds.setdefault(bucket.first.round, []).append(bucket)
        found = [self._stages(buckets, lambda stage: self._first_wait(stage)) for buckets in rounds.values()]
        kept = [self._kept_before(stages, direction) for stages in found]
        uses = sorted({place for stages in found for place in map(self._first_wait, stages)}.union(*kept))
        for stages, before in zip(found, kept, strict=True):
            self._prefetch_round(stages, before, uses, direction)

    def _prefetch_round(self, stages: Sequence[Stage], kept: Sequence[int], uses: Sequence[int], direction: Direction) -> None:
        """``uses`` are those of all rounds: where an entry is gathered again and again, rounds are used in turn."""
        anchors = [*kept, *map(self._first_wait, stages)]
        for index, stage in enumerate(stages, len(kept)):
            ahead, own = max(0, index - self.rules.prefetch), bisect_left(uses, anchors[index])
            anchor = max(anchors[ahead], uses[max(0, own - self.rules.prefetch)])
            if ahead >= len(kept):  # not over the other direction's compute, into another microbatch
                turn = self.starts.turn(direction, anchors[index])
                anchor = max(anchor, uses[bisect_left(uses, turn)])
            for bucket in sorted(stage, key=lambda bucket: self.order.index[bucket.launch]):
                if bucket.launch not in self.by_hand and self._hoist(bucket, anchor, direction):
                    self.kept.append((bucket.launch, self.order.nodes[anchor]))

    def _kept_before(self, stages: Sequence[Stage], direction: Direction) -> list[int]:
        """Where entries start to compute in backward, before the first of ``stages``, on what forward gathered: stages, too."""
        if direction == "forward" or not stages:
            return []
        first, number = self._first_wait(stages[0]), stages[0][0].first.round
        again = {bucket.first.entry for bucket in self._gathers("backward")}
        entries = dict.fromkeys(bucket.first.entry for bucket in self._gathers("forward"))
        starts = (self.starts.found(direction, entry, number) for entry in entries if entry and entry not in again)
        return sorted(start for start in starts if start is not None and start < first)

    def defer(self) -> None:
        """Wait for each stage's reductions behind the next stage's launches, level by level of those that follow each other."""
        levels: dict[int, list[Merged]] = {}
        for bucket in self._reductions():
            levels.setdefault(bucket.level, []).append(bucket)
        for level in sorted(levels):
            stages = self._stages(levels[level], lambda stage: max(self._place(bucket) for bucket in stage))
            for stage, following in pairwise(stages):
                anchor = max(self._place(bucket) for bucket in following)[1]
                for bucket in stage:
                    for wait in bucket.waits:
                        if wait not in self.by_hand and self._sink(bucket, wait, anchor):
                            self.kept.append((self.order.nodes[anchor], wait))

    def update_when_ready(self, nodes: Iterable[fx.Node]) -> None:
        """Let what ``nodes`` update start behind the waits as they stand by now."""
        updating = {self.order.index[node] for node in nodes}
        waits = waits_of(self.order, self.buckets)
        moved = hoist_updates(self.order, self.wishes, updating, waits)
        self.kept += kept_pairs(self.order, self.wishes, moved, waits.keys())
        self.left += why_late(self.order, updating, waits)

    def place_gathers(self, direction: Direction) -> None:
        """``launch_at``: at the start of another entry's compute."""
        for entry, other in sorted(self.rules.launch_at.get(direction, {}).items()):
            where = f"launch_at.{direction}: {entry!r} at {other!r}"
            buckets = self._named(self._gathers(direction), entry, where, "all-gather")
            for bucket in buckets:
                at, own = (self.starts.of(direction, one, where, bucket.first.round) for one in (other, entry))
                launch = self.order.index[bucket.launch]
                blocked = blocker(self.order, [launch], at)
                if at >= own or (blocked is not None and blocked >= at):
                    late = f"{entry!r} is used first" if at >= own else f"it needs {self.order.nodes[blocked or 0].name}"
                    raise PlanError(f"{where} is impossible: when the compute of {other!r} starts, {late}")
                self.by_hand.add(bucket.launch)
                pull_up(self.order, self.wishes, [launch], at - 0.5)
                self.wishes[launch] = at - 0.5
                self.kept.append((bucket.launch, self.order.nodes[at]))

    def place_reductions(self, direction: Direction) -> None:
        """``wait_before``: right before another entry's compute."""
        for entry, other in sorted(self.rules.wait_before.get(direction, {}).items()):
            where = f"wait_before.{direction}: {entry!r} before {other!r}"
            buckets = self._named([b for b in self._reductions() if b.first.direction == direction], entry, where, "reduction")
            last = max(bucket.level for bucket in buckets)
            buckets = [bucket for bucket in buckets if bucket.level == last]
            at = self.starts.of(direction, other, where)
            for bucket in buckets:
                for wait in bucket.waits:
                    self._wait_right_before(wait, bucket, at, where, other)

    def _wait_right_before(self, wait: fx.Node, bucket: Merged, at: int, where: str, other: str) -> None:
        index = self.order.index[wait]
        if self.order.index[bucket.launch] >= at:
            raise PlanError(f"{where} is impossible: the compute of {other!r} starts before the reduction is launched")
        blocked = self._waiting(index, at, bucket)
        if blocked is not None:
            name = self.order.nodes[blocked].name
            raise PlanError(f"{where} is impossible: {name} needs the result before the compute of {other!r} starts")
        self.by_hand.add(wait)
        self.wishes[index] = at - 0.5
        self.kept.append((wait, self.order.nodes[at]))

    def _hoist(self, bucket: Merged, anchor: int, direction: Direction) -> bool:
        """Launch ``bucket`` before ``anchor``, or as early as what it needs allows; whether it stands before it then."""
        launch = self.order.index[bucket.launch]
        if launch < anchor:
            return True
        blocked = blocker(self.order, [launch], anchor)
        if blocked is None:
            pull_up(self.order, self.wishes, [launch], anchor - 0.5)
            return True
        names = self.order.nodes[anchor].name, self.order.nodes[blocked].name
        reason = f"{bucket.launch.name} cannot be launched before {names[0]}: it depends on {names[1]}"
        self.left.append(LeftAlone(f"launch of {bucket.first.entry} ({direction})", reason))
        pull_up(self.order, self.wishes, [launch], blocked + 0.5)
        return False

    def _sink(self, bucket: Merged, wait: fx.Node, anchor: int) -> bool:
        """Wait behind ``anchor``, and launch what reduces the result further behind that; whether that can be."""
        index = self.order.index[wait]
        if self.wishes[index] > self.wishes[anchor]:
            return True
        chained = self._chained(bucket)
        needing = readers_before(self.after, index, anchor + 1)
        blocked = self._waiting(index, anchor + 1, bucket, chained)
        if blocked is None:
            place = self.wishes[anchor] + 0.5 ** (bucket.level + 1)
            for moved in [index, *(i for i in needing if self.order.nodes[i] in chained)]:
                self.wishes[moved] = max(self.wishes[moved], place)
            return True
        names = self.order.nodes[anchor].name, self.order.nodes[blocked].name
        reason = f"{wait.name} cannot wait until {names[0]} is launched: {names[1]} depends on it"
        self.left.append(LeftAlone(f"wait of {bucket.first.entry}'s reduction", reason))
        return False

    def _waiting(self, wait: int, bound: int, bucket: Merged, aside: frozenset[fx.Node] = frozenset()) -> int | None:
        """First launch or wait before ``bound`` that depends on the wait at ``wait``; not ``bucket``'s, nor one ``aside``."""
        needing = readers_before(self.after, wait, bound)[1:]
        aside = aside.union(bucket.waits)
        return next((n for n in needing if communicates(self.order.nodes[n]) and self.order.nodes[n] not in aside), None)

    def _chained(self, bucket: Merged) -> frozenset[fx.Node]:
        """Launches and waits that reduce further what ``bucket`` does: those of its entry and of higher levels."""
        same = [b for b in self.reductions_of.get(bucket.first.entry, ()) if b.level > bucket.level]
        return frozenset(node for b in same for node in (b.launch, *b.waits) if node not in self.by_hand)

    def _gathers(self, direction: Direction) -> list[Merged]:
        return [b for b in self.buckets if b.first.kind == "all_gather" and b.first.direction == direction]

    def _reductions(self) -> list[Merged]:
        return [b for b in self.buckets if b.first.kind in REDUCTIONS]

    def _first_wait(self, stage: Iterable[Merged]) -> int:
        return min(self.order.index[wait] for bucket in stage for wait in bucket.waits)

    def _place(self, bucket: Merged) -> tuple[float, int]:
        """Where the launch of ``bucket`` wishes to stand, and where it stands."""
        index = self.order.index[bucket.launch]
        return self.wishes[index], index

    def _stages(self, buckets: Sequence[Merged], key: Callable[[Stage], Any]) -> list[Stage]:
        """Buckets by entry, or each alone if they have none, sorted."""
        stages: dict[object, Stage] = {}
        for bucket in buckets:
            stages.setdefault(bucket.first.entry or bucket.launch, []).append(bucket)
        return sorted(stages.values(), key=key)

    def _named(self, buckets: Sequence[Merged], entry: str, where: str, what: str) -> list[Merged]:
        named = [bucket for bucket in buckets if bucket.first.entry == entry]
        if not named:
            known = ", ".join(dict.fromkeys(bucket.first.entry for bucket in buckets)) or "none"
            raise PlanError(f"{where} names no bucket: entry {entry!r} has no {what} there; entries that have one: {known}")
        return named
