"""Reorders launches and waits so that communication hides behind compute; only what must move moves.

A stage is an entry, whose buckets are needed together; by size, each bucket is a stage. All-gathers are prefetched for each
direction and round (microbatch) on its own: a stage's gathers are launched before the first wait of the stage ``prefetch``
stages ahead of it, but no more than ``prefetch`` uses ahead of their own, counted over all rounds. In backward an entry that
stayed gathered is a stage, too, which begins where it computes. Reductions of a stage are waited for behind the launches of the
next stage. What the scheduler places by hand (:mod:`pytest_fxbucket.passes.by_hand`) stands there instead.
Updates of parameters follow the waits, where that is asked for (:mod:`pytest_fxbucket.passes.updates`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import REDUCTIONS, communicates
from pytest_fxbucket.passes import by_hand
from pytest_fxbucket.passes.arrange import arranged, blocker, pull_up, readers, readers_before, relink
from pytest_fxbucket.passes.compute import readers_of
from pytest_fxbucket.passes.report import ReorderReport
from pytest_fxbucket.passes.targets import UntouchedLaunch
from pytest_fxbucket.passes.updates import hoist_updates, kept_pairs, tell_apart, waits_of, why_late

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.scheduler import Scheduler
    from pytest_fxbucket.step.roles import Direction

Stage = list["Merged"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def reorder(graph: fx.Graph, scheduler: Scheduler, updating: Iterable[fx.Node]) -> ReorderReport:
    """Move launches and waits of the buckets in ``graph``, with what they need and who reads them, as ``scheduler`` says.

    ``updating`` are the optimizer's nodes, which move if the rules say so. Raises :class:`PlanError` for a place by hand that
    names no bucket, or that cannot be had.
    """
    # Rules only write wishes; nodes are moved once, when all rules have spoken. The order of the calls matters: deferring and
    # updating go by the wishes that were made before them.
    moves = _Moves(scheduler)
    for direction in DIRECTIONS:
        moves.prefetch(direction)
    moves.place_gathers()
    moves.place_reductions()
    if scheduler.rules.defer_reduce:
        moves.defer()
    if scheduler.rules.updates == "ready":
        moves.update_when_ready(updating)
    found = moves.arranged()
    if found is not None:
        moves.refuse_missed(found)
        relink(graph, [moves.order.nodes[index] for index in found])
    return ReorderReport(tuple(moves.left), tuple(moves.kept))


class _Moves:
    """Wishes of all nodes, from one look at the graph before anything moves."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.order, self.buckets, self.rules = scheduler.order, scheduler.buckets, scheduler.rules
        self.after = readers(self.order)
        self.starts = scheduler.starts
        self.wishes = [float(index) for index in range(len(self.order.nodes))]
        self.reductions_of: dict[str, list[Merged]] = {}
        for bucket in self._reductions():
            if bucket.first.entry:
                self.reductions_of.setdefault(bucket.first.entry, []).append(bucket)
        gathers = (bucket for bucket in self.buckets if bucket.first.kind == "all_gather")
        self.launches = by_hand.launches(scheduler, gathers)
        self.waits = by_hand.waits(scheduler, self._reductions())
        self.by_hand = {at.bucket.launch for at in self.launches}.union(*(at.bucket.waits for at in self.waits))
        """Launches and waits that the user placed."""
        self.left: list[UntouchedLaunch] = []
        self.kept: list[tuple[fx.Node, fx.Node]] = []

    def prefetch(self, direction: Direction) -> None:
        """Launch each stage's gathers ``prefetch`` stages ahead, the first stages of a round together; 0 moves nothing."""
        rounds: dict[int, list[Merged]] = {}
        for bucket in self._gathers(direction) if self.rules.prefetch else []:
            rounds.setdefault(bucket.first.round, []).append(bucket)
        found = [self._stages(buckets, lambda stage: self._first_wait(stage)) for buckets in rounds.values()]
        kept = [self._kept_before(stages, direction) for stages in found]
        uses = sorted({place for stages in found for place in map(self._first_wait, stages)}.union(*kept))
        for stages, before in zip(found, kept, strict=True):
            self._prefetch_round(stages, before, uses, direction)

    def _prefetch_round(self, stages: Sequence[Stage], kept: Sequence[int], uses: Sequence[int], direction: Direction) -> None:
        """Prefetch the ``stages`` of one round. ``kept``: stages that stayed gathered; ``uses``: the uses of all rounds."""
        # A launch goes up to the latest of three places: the stage ``prefetch`` ahead of it in its own round, the use
        # ``prefetch`` ahead of its own in any round (entries gathered for each use take turns), and the first use behind the
        # last compute of the other direction.
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
        """Where entries start to compute in backward on what forward gathered, before the first of ``stages``.

        Each of these places counts as a stage.
        """
        if direction == "forward" or not stages:
            return []
        first, number = self._first_wait(stages[0]), stages[0][0].first.round
        again = {bucket.first.entry for bucket in self._gathers("backward")}
        entries = dict.fromkeys(bucket.first.entry for bucket in self._gathers("forward"))
        starts = (self.starts.start_of(direction, entry, number) for entry in entries if entry and entry not in again)
        return sorted(start for start in starts if start is not None and start < first)

    def defer(self) -> None:
        """Wait for each stage's reductions behind the next stage's launches, one level of reductions after the other."""
        levels: dict[int, list[Merged]] = {}
        for bucket in self._reductions():
            levels.setdefault(bucket.level, []).append(bucket)
        # A wait that is put off takes the launches along that reduce its result further. So the lower level comes first, and
        # the higher one goes by where its launches wish to stand then.
        for level in sorted(levels):
            stages = self._stages(levels[level], lambda stage: max(self._place(bucket) for bucket in stage))
            for stage, following in pairwise(stages):
                # The launch of the next stage that will stand last.
                anchor = max(self._place(bucket) for bucket in following)[1]
                for bucket in stage:
                    for wait in bucket.waits:
                        if wait not in self.by_hand and self._sink(bucket, wait, anchor):
                            self.kept.append((self.order.nodes[anchor], wait))

    def update_when_ready(self, nodes: Iterable[fx.Node]) -> None:
        """Let the optimizer's ``nodes`` run right behind the waits that they need, at the places those will have by now."""
        found = self.arranged()
        if found is not None:
            tell_apart(self.order, self.wishes, found)
        updating = {self.order.index[node] for node in nodes}
        waits = waits_of(self.order, self.buckets)
        moved = hoist_updates(self.order, self.wishes, updating, waits)
        self.kept += kept_pairs(self.order, self.wishes, moved, waits.keys())
        self.left += why_late(self.order, updating, waits)

    def place_gathers(self) -> None:
        """Place launches by hand, with what they need. One that is asked for before another launch comes after that one."""
        for asked in self.launches:
            launch, at = self.order.index[asked.bucket.launch], self.order.index[asked.node]
            blocked = blocker(self.order, [launch], at)
            if blocked is not None and blocked >= at:
                raise PlanError(f"{asked.where} is impossible: when {asked.when}, it needs {self.order.nodes[blocked].name}")
            place = self._right_before(at)
            used = min((self.order.index[node] for node in readers_of(asked.bucket.results)), default=None)
            if used is not None and used < place:
                name = self.order.nodes[used].name
                raise PlanError(f"{asked.where} is impossible: when {asked.when}, {name} has used what is gathered")
            pull_up(self.order, self.wishes, [launch], place)
            # ``pull_up`` puts nothing off, and the place may also be behind the one that it has.
            self.wishes[launch] = place
            self.kept.append((asked.bucket.launch, asked.node))

    def place_reductions(self) -> None:
        """Waits by hand."""
        for asked in self.waits:
            at = self.order.index[asked.node]
            if self.order.index[asked.bucket.launch] >= at:
                raise PlanError(f"{asked.where} is impossible: {asked.when} before the reduction is launched")
            for wait in asked.bucket.waits:
                index = self.order.index[wait]
                blocked = self._waiting(index, at, asked.bucket)
                if blocked is not None:
                    name = self.order.nodes[blocked].name
                    raise PlanError(f"{asked.where} is impossible: {name} needs the result before {asked.when}")
                self.wishes[index] = self._right_before(at)
                self.kept.append((wait, asked.node))

    def arranged(self) -> list[int] | None:
        """The order of all nodes that the wishes lead to; None if every node wishes to stand where it stands."""
        if self.wishes == list(map(float, range(len(self.order.nodes)))):
            return None
        return arranged(dict(enumerate(self.order.before)), self.wishes)

    def refuse_missed(self, found: Sequence[int]) -> None:
        """Raise :class:`PlanError` for a place by hand that the order ``found`` does not keep, whatever stood in the way."""
        place = {index: number for number, index in enumerate(found)}
        for asked in (*self.launches, *self.waits):
            moved = [asked.bucket.launch] if asked in self.launches else asked.bucket.waits
            late = next((node for node in moved if place[self.order.index[node]] > place[self.order.index[asked.node]]), None)
            if late is not None:
                raise PlanError(f"{asked.where} is impossible: {late.name} can only stand behind {asked.node.name}")

    def _right_before(self, at: int) -> float:
        """A place between the node ``at``, which may have moved, and all that stands before it."""
        # Nodes that did not move wish for whole numbers: half way down to the next one, nothing of theirs is in between.
        return (ceil(self.wishes[at]) - 1 + self.wishes[at]) / 2

    def _hoist(self, bucket: Merged, anchor: int, direction: Direction) -> bool:
        """Launch ``bucket`` before ``anchor``, or as early as what it needs allows; tell whether it is before ``anchor``."""
        launch = self.order.index[bucket.launch]
        if launch < anchor:
            return True
        blocked = blocker(self.order, [launch], anchor)
        if blocked is None:
            pull_up(self.order, self.wishes, [launch], anchor - 0.5)
            return True
        names = self.order.nodes[anchor].name, self.order.nodes[blocked].name
        reason = f"{bucket.launch.name} cannot be launched before {names[0]}: it depends on {names[1]}"
        self.left.append(UntouchedLaunch(f"launch of {bucket.first.entry} ({direction})", reason))
        pull_up(self.order, self.wishes, [launch], blocked + 0.5)
        return False

    def _sink(self, bucket: Merged, wait: fx.Node, anchor: int) -> bool:
        """Move ``wait`` behind ``anchor``, with the launches that reduce its result further; tell whether that can be."""
        index = self.order.index[wait]
        if self.wishes[index] > self.wishes[anchor]:
            return True
        chained = self._chained(bucket)
        needing = readers_before(self.after, index, anchor + 1)
        blocked = self._waiting(index, anchor + 1, bucket, chained)
        if blocked is None:
            # The anchor of a higher level may itself have been put off by a lower one. Halves, quarters and so on add up to
            # less than one, so that even then the wait stands before the node behind the first anchor.
            place = self.wishes[anchor] + 0.5 ** (bucket.level + 1)
            for moved in [index, *(i for i in needing if self.order.nodes[i] in chained)]:
                self.wishes[moved] = max(self.wishes[moved], place)
            return True
        names = self.order.nodes[anchor].name, self.order.nodes[blocked].name
        reason = f"{wait.name} cannot wait until {names[0]} is launched: {names[1]} depends on it"
        self.left.append(UntouchedLaunch(f"wait of {bucket.first.entry}'s reduction", reason))
        return False

    def _waiting(self, wait: int, bound: int, bucket: Merged, aside: frozenset[fx.Node] = frozenset()) -> int | None:
        """First launch or wait before ``bound`` that depends on ``wait``; waits of ``bucket`` and ``aside`` do not count."""
        needing = readers_before(self.after, wait, bound)[1:]
        aside = aside.union(bucket.waits)
        return next((n for n in needing if communicates(self.order.nodes[n]) and self.order.nodes[n] not in aside), None)

    def _chained(self, bucket: Merged) -> frozenset[fx.Node]:
        """Launches and waits that reduce further what ``bucket`` reduced: reductions of its entry that have a higher level."""
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
