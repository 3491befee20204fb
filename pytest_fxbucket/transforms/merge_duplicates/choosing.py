"""Which launches of a graph bring the same, which of them are merged, and why the others are not."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import fx

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.order import Order
from pytest_fxbucket.graph.walks import made_of, writers_in
from pytest_fxbucket.passes.compute import readers_of
from pytest_fxbucket.passes.new_nodes import has_numbers
from pytest_fxbucket.step.roles import Value
from pytest_fxbucket.transforms.merge_duplicates.mergeable import GraphWrites, MergeableLaunch, named, read
from pytest_fxbucket.transforms.merge_duplicates.values import ValueNumbers, dtype_of, form_of

Again = Literal[False, True, "backward", "microbatches"]
"""Which launches that repeat another on purpose are merged: none, across sides of a round, across rounds of a side, all."""
_WHY_SIDE = (
    '{side} launches its own instead of keeping it, as reshard_after_forward = true has it; again = "backward" merges it'
)
_WHY_ROUND = 'each round (microbatch) launches its own instead of keeping it; again = "microbatches" merges it'


@dataclass(slots=True)
class KeptLaunch:
    """A launch that stays, and the launches that are merged into it."""

    sent: MergeableLaunch
    merged: list[tuple[MergeableLaunch, bool]] = field(default_factory=list)
    """Each with whether its readers get a copy: two outputs of the graph must not be one tensor."""
    given_out: bool = False
    """Whether an output of the graph lies in the memory of its result, or of a result merged into it without a copy."""


@dataclass(frozen=True, slots=True)
class UnmergedLaunch:
    """A launch that was not merged although another one sends what it sends."""

    launch: fx.Node
    why: str
    on_purpose: bool = False


class Duplicates:
    """Finds the duplicates in a graph, given as its ``order``; ``outputs`` describe what the graph returns."""

    def __init__(self, order: Order, outputs: Sequence[Value], again: Again) -> None:
        self.order, self.again = order, again
        # Two numberings: ``regardless`` of writes finds the candidates, and ``values``, which heeds them, decides. Candidates
        # that the second tells apart saw a write in between, or share only a part of what they send: that is the reason then.
        self.writes = GraphWrites(order)
        self.regardless = ValueNumbers(order)
        self.values = ValueNumbers(order, self.writes, self.regardless)
        self.turns = Turns(order, outputs)
        self.out = {storage for node in order.nodes[-1].all_input_nodes for storage in order.storages(node)}

    def chosen(self) -> tuple[list[KeptLaunch], list[UnmergedLaunch]]:
        """(launches that others are merged into, launches that are left), in the graph's order.

        Each launch is merged into the first one that brings the same in its turn, or is left with a reason.
        """
        kept: dict[Hashable, KeptLaunch] = {}
        left: list[UnmergedLaunch] = []
        for sent, before in self._sharing_launches():
            key = (self.values.sent(sent.launch), self._stretch(self.turns.of(sent.launch)))
            if sent.problem:
                left += [UnmergedLaunch(sent.launch, sent.problem)] if before else []
            elif key in kept and _fits(kept[key].sent, sent):
                one, is_given_out = kept[key], self._is_given_out(sent)
                # The first of them that the graph gives out is the kept result itself; each further one is a copy.
                one.merged.append((sent, one.given_out and is_given_out))
                one.given_out |= is_given_out
            else:
                # A launch that does not fit stays alone: those behind it are still merged into the first.
                kept.setdefault(key, KeptLaunch(sent, given_out=self._is_given_out(sent)))
                left += [self._left(sent, before)] if before else []
        return [one for one in kept.values() if one.merged], left

    def _sharing_launches(self) -> Iterator[tuple[MergeableLaunch, list[MergeableLaunch]]]:
        """Launches that share a sent value with another one, writes aside; each with the launches before it that share one.

        Coalesced launches send several values, of which one in common is enough.
        """
        known: list[tuple[MergeableLaunch, list[Hashable]]] = []
        by_key: dict[Hashable, list[MergeableLaunch]] = {}
        for node in self.order.nodes:
            if collectives.launch_kind(node) is None:
                continue
            sent = read(node, self.writes)
            keys: list[Hashable] = [(sent.says, self.regardless.read(t, sent.index), dtype_of(t)) for t in sent.tensors]
            known.append((sent, keys))
            for key in dict.fromkeys(keys):
                by_key.setdefault(key, []).append(sent)
        # A second walk: who shares a value with a later launch is known only now.
        for sent, keys in known:
            group = {id(one): one for key in keys for one in by_key[key]}
            if len(group) > 1:
                before = sorted((one for one in group.values() if one.index < sent.index), key=lambda one: one.index)
                yield sent, before

    def _stretch(self, turn: ComputeStretch) -> Hashable:
        """What must be equal of two launches' turns for them to be merged; ``again`` says how much of a turn counts."""
        return {False: turn, True: (), "backward": turn.round, "microbatches": turn.side}[self.again]

    def _is_given_out(self, sent: MergeableLaunch) -> bool:
        return not self.out.isdisjoint(self.order.storages(sent.launch))

    def _left(self, sent: MergeableLaunch, before: Sequence[MergeableLaunch]) -> UnmergedLaunch:
        """Why ``sent``, which may be merged, was merged into none of the launches ``before`` it; the nearest is asked first."""
        value, mine = self.values.sent(sent.launch), self.turns.of(sent.launch)
        same = [(one, self.turns.of(one.launch)) for one in reversed(before) if self.values.sent(one.launch) == value]
        for one, turn in same:
            if self._stretch(turn) == self._stretch(mine):
                return UnmergedLaunch(
                    sent.launch, f"of the one before ({one.launch.name}): {one.problem or 'its result lies otherwise'}"
                )
        if same:
            why = _WHY_ROUND if any(turn.side == mine.side for _, turn in same) else _WHY_SIDE.format(side=mine.side)
            return UnmergedLaunch(sent.launch, why, on_purpose=True)
        return UnmergedLaunch(sent.launch, self._other_value(sent, before[-1]))

    def _other_value(self, sent: MergeableLaunch, one: MergeableLaunch) -> str:
        """Which write makes ``sent`` send another value than ``one`` before it, as a clause."""
        if len(sent.tensors) > 1 or len(one.tensors) > 1:
            return f"other tensors go in the same launch, of it or of the one before ({one.launch.name})"
        # A write that both saw makes no difference between them.
        places = self.values.last_writes(sent.launch) ^ self.values.last_writes(one.launch)
        if not places:
            return f"it reads memory that was written otherwise than {one.launch.name} does, so it may send something else"
        return f"{named(self.order.nodes[min(places)])} what it sends, between the one before ({one.launch.name}) and it"


def _fits(kept: MergeableLaunch, sent: MergeableLaunch) -> bool:
    """Whether what ``kept`` brings can stand for what ``sent`` brings: as it is, or viewed in the shape of the latter."""
    if form_of(kept.launch) == form_of(sent.launch):
        return True
    # A view of another shape needs sizes that are known, and elements without gaps.
    values = [one.launch.meta.get("val") for one in (kept, sent)]
    return all(isinstance(value, FakeTensor) and has_numbers(value) and value.is_contiguous() for value in values)


# Which side of a step a launch works for, forward or backward, and in which round: each microbatch has one of both.
#
# Compute is walked in order and cut into stretches of one side. A launch belongs to the stretch of the first compute that reads
# what it brings, not to the one in which it stands: a prefetch stands earlier than what it is for.


Side = Literal["forward", "backward"]
"""Updates, and what else comes after backward, count as backward."""


class ComputeStretch(NamedTuple):
    """A stretch of compute nodes that all belong to one side."""

    side: Side
    round: int
    """How many stretches of its side stand before it."""


class Turns:
    """The stretches of a graph's compute."""

    def __init__(self, order: Order, outputs: Sequence[Value]) -> None:
        self._order = order
        self._of: dict[fx.Node, ComputeStretch] = {}
        self._begins: list[int] = []
        self._turns: list[ComputeStretch] = []
        counts: dict[Side, int] = {"forward": 0, "backward": 0}
        ends = zip(returned(order.nodes[-1]), outputs, strict=True)
        losses = [node for node, value in ends if value.role == "loss" and hasattr(node, "users")]
        needed = made_of(losses, writers_in(losses[0].graph)) if losses else set()
        # Backward is what autograd marked, in a graph without marks all compute, in both but for what the loss needs.
        is_marked = any(direction_of(node) == "backward" for node in order.nodes)
        for index, node in enumerate(order.nodes):
            if not computes(node):
                continue
            side: Side = "forward"
            if node not in needed and (direction_of(node) == "backward" or (losses and not is_marked)):
                side = "backward"
            elif node not in needed and losses:
                continue  # of neither: an update, or what forward computes besides the loss
            if not self._turns or self._turns[-1].side != side:
                self._begins.append(index)
                self._turns.append(ComputeStretch(side, counts[side]))
                counts[side] += 1

    def of(self, launch: fx.Node) -> ComputeStretch:
        """The turn of the first compute that reads what ``launch`` brings; without one, the turn where ``launch`` stands."""
        if launch not in self._of:
            place = min((self._order.index[node] for node in readers_of([launch])), default=self._order.index[launch])
            at = bisect_right(self._begins, place) - 1
            self._of[launch] = self._turns[max(at, 0)] if self._turns else ComputeStretch("forward", 0)
        return self._of[launch]
