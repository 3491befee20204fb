"""``add_before_reducing``: RS(a) + RS(b) becomes RS(a + b), which rounds otherwise.

The first half of the file decides for two reductions and their sum whether what they send may be added instead of what they
bring; the second half does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import written
from pytest_fxbucket.graph.ops import is_view, operator_name
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.walks import walked
from pytest_fxbucket.passes.new_nodes import LAUNCHES, NodeMaker, fake_value
from pytest_fxbucket.process import collector
from pytest_fxbucket.step.roles import Phase, StepGraph, Transformed
from pytest_fxbucket.transforms.merge_duplicates import brings_too, erase
from pytest_fxbucket.transforms.merge_duplicates.mergeable import GraphWrites, Labels, MergeableLaunch, named, read
from pytest_fxbucket.transforms.merge_duplicates.values import form_of
from pytest_fxbucket.transforms.transformation import transformation

_OPERATORS = frozenset({"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"})
_LINEAR = ("sum", "avg")
_SHOWS = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "contiguous", "view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze"),
        "_to_copy",
    )
)
"""Operators that keep all elements in their order."""
PERMUTES = _SHOWS | {"aten::t", "aten::transpose", "aten::permute"}
"""Operators that keep every element but may reorder them: for these, f(a) + f(b) is f(a + b)."""


@dataclass(frozen=True, slots=True)
class ReducedValue:
    """One reduction, and the nodes between it and the sum that reads it."""

    sent: MergeableLaunch
    """The launch as the graph had it at first; by now it may send a sum."""
    way: tuple[fx.Node, ...]
    """The nodes from its wait up to the sum, the wait first; further waits for the same result are among them."""

    @property
    def launch(self) -> fx.Node:
        """The launching node."""
        return self.sent.launch

    @property
    def steps(self) -> list[fx.Node]:
        """:attr:`way` without waits."""
        return [node for node in self.way if not collectives.is_wait(node)]

    @property
    def sends(self) -> fx.Node:
        """What it sends now."""
        return self.launch.all_input_nodes[0]


def why_apart(node: fx.Node, one: ReducedValue, other: ReducedValue) -> str:
    """Why the sum ``node`` must stay behind the reductions ``one`` and ``other``; empty if not. Writes are left aside here."""
    if written(node):
        return f"{node.name} adds in place"
    alpha: Any = node.kwargs.get("alpha", 1)
    if alpha != 1:
        return f"{node.name} adds {alpha} times the second"
    found = _of_one(node, one) or _of_one(node, other) or _differ(one, other)
    # The readers of the sum read the last node of a way in its place, so both must lie alike.
    return found or ("" if form_of(node) == form_of(one.way[-1]) else "the sum lies otherwise in memory than its addends")


def _of_one(node: fx.Node, reduced: ReducedValue) -> str:
    launch, way = reduced.launch, reduced.way
    if operator_name(launch) not in _OPERATORS:
        return f"{launch.target} ({launch.name}) is not merged"
    if reduced.sent.problem:
        return f"{launch.name}: {reduced.sent.problem}"
    if (op := collectives.argument(launch, "reduce_op")) not in _LINEAR:
        return f"{launch.name} reduces by {op}, expected {' or '.join(_LINEAR)}"
    # The result of each step alone is no longer made: nobody but the next step may read it.
    for step, reader in zip((launch, *way), (*way, node), strict=True):
        if foreign := next((user for user in step.users if user is not reader), None):
            return f"{foreign.name} reads what {launch.name} brings, too"
    for step in reduced.steps:
        before, after = fake_value(step.all_input_nodes[0]), fake_value(step)
        if operator_name(step) not in PERMUTES or (before.dtype, before.device) != (after.dtype, after.device):
            return f"{step.target} ({step.name}) stands between {launch.name} and the sum"
    return "" if fake_value(reduced.sends).is_contiguous() else f"{launch.name} sends what is not contiguous"


def _differ(one: ReducedValue, other: ReducedValue) -> str:
    """What differs between both though it must be the same, as a clause; empty if nothing does."""
    if one.sent.says != other.sent.says:
        return "they differ in kind, operation, ranks or process group"
    forms = [(form_of(reduced.sends), form_of(reduced.launch)) for reduced in (one, other)]
    if forms[0] != forms[1]:
        return "they reduce tensors of other shapes, dtypes or devices"
    # Ways that keep the order of elements may differ in their steps: equal forms at the end are enough. Where one permutes,
    # both must take the same steps with the same arguments, or elements would meet other partners.
    if all(operator_name(step) in _SHOWS for reduced in (one, other) for step in reduced.steps):
        is_same = form_of(one.way[-1]) == form_of(other.way[-1])
    else:
        ways = [[(step.target, repr(step.args[1:]), repr(step.kwargs)) for step in reduced.steps] for reduced in (one, other)]
        is_same = ways[0] == ways[1]
    return "" if is_same else "they do not go the same way to the sum"


NAME = "add_before_reducing"
_ROUNDS = "what was added after two reductions is added before one, and so rounded on each rank before the sum over ranks"
_ADDS = frozenset({"aten::add", "aten::add_"})


@transformation(before=("bucket",), keeps_collectives=False, rounds=_ROUNDS)
def add_before_reducing(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    """Add before reducing in ``step``'s graphs: reduce-scatters, or all-reduces, whose results nobody reads but their sum.

    Both reduce by sum or avg, over one group, in one dtype, and go the same way of views and copies to the sum. A sum of more
    than two is taken addition by addition, in graph order. What is sent may not be written between both launches, and no result
    may be written at all. The one reduction stands where the later of the two stood. Every such sum is rounded otherwise than
    before. Raises :class:`PassError` for nodes without fake values.
    """
    done: list[str] = []
    left: list[tuple[str, str]] = []
    with collector.paused():
        for phase in step.graphs:
            adding = _Adding(step, phase)
            adding.run()
            done += adding.done()
            left += adding.left
    return replace(step, transformed=(*step.transformed, Transformed(NAME, tuple(done), tuple(left))))


class _Adding:
    """One graph, whose additions are visited in order: a sum that became one reduction may be an addend of the next."""

    def __init__(self, step: StepGraph, phase: Phase) -> None:
        self.graph_module = step.graphs[phase]
        self.graph = self.graph_module.graph
        self.order = order_of(self.graph)
        self.writes = GraphWrites(self.order)
        self.labels = Labels(self.graph, step.inputs[phase], step.outputs[phase])
        self.sent: dict[fx.Node, MergeableLaunch] = {}
        """Every reduction met so far, as the graph had it at first."""
        self.added: dict[fx.Node, list[str]] = {}
        """For each launch that reduces a sum, the labels of all reductions that it stands for."""
        self.mixed: dict[fx.Node, ReducedValue] = {}
        """For each addition of a reduction and something else, the reduction: only to report sums that were missed for it."""
        self.left: list[tuple[str, str]] = []

    def run(self) -> None:
        """Change the graph."""
        for node in self.order.nodes:
            if operator_name(node) not in _ADDS or len(node.all_input_nodes) != 2:
                continue
            one, other = (self._reduced(source) for source in node.all_input_nodes)
            if one is None or other is None:
                self._note_mixed(node, one or other)
                continue
            # RS(a) + RS(a): one launch gives both addends already.
            if one.launch is other.launch:
                continue
            labels = [*self._labels(one), *self._labels(other)]
            if why := why_apart(node, one, other) or self._written(node, one, other):
                self.left.append((" + ".join(dict.fromkeys(labels)), why))
            else:
                self._add(node, one, other)
                self.added[max(one, other, key=_place).launch] = labels
        if self.added:
            self.graph_module.recompile()

    def done(self) -> Iterator[str]:
        """A clause for each reduction of a sum."""
        for labels in self.added.values():
            yield f"{' + '.join(dict.fromkeys(labels))}: {len(labels)} launches are 1, of what each rank adds before"

    def _note_mixed(self, node: fx.Node, reduced: ReducedValue | None) -> None:
        """Note the addition ``node``, of which at most the one addend ``reduced`` is a reduction.

        In RS(a) + x + RS(b) the two reductions never meet in one addition, which is reported.
        """
        mixed = next((source for source in node.all_input_nodes if source in self.mixed), None)
        before = None if mixed is None else self.mixed[mixed]
        if mixed is not None and before is not None and reduced is not None and not self._is_made_of(reduced, before, mixed):
            why = f"they are not added to each other: {mixed.name} adds something else in between"
            self.left.append((" + ".join(dict.fromkeys([*self._labels(before), *self._labels(reduced)])), why))
        if found := reduced or before:
            self.mixed[node] = found

    def _is_made_of(self, reduced: ReducedValue, before: ReducedValue, mixed: fx.Node) -> bool:
        """Whether ``reduced`` is ``before``, or sends something computed from ``mixed``: then they could not be one anyway."""
        # What stands before ``mixed`` is not made of it, so the walk back ends there. Sums that were made here have no place in
        # the order, and are followed.
        first = self.order.index[mixed]
        made_of = walked(
            [reduced.launch],
            lambda node: (one for one in node.all_input_nodes if self.order.index.get(one, first) >= first),
        )
        return reduced.launch is before.launch or mixed in made_of

    def _labels(self, reduced: ReducedValue) -> list[str]:
        return self.added.get(reduced.launch) or [self.labels.of(reduced.launch)]

    def _reduced(self, node: fx.Node) -> ReducedValue | None:
        """The reduction whose result ``node`` is, behind waits, views, copies and permutations; None if there is none."""
        way = [node]
        while collectives.launch_kind(way[0]) is None:
            passes = collectives.is_wait(way[0]) or is_view(way[0]) or operator_name(way[0]) in PERMUTES
            if not passes and way[0].target is not getitem:
                return None
            way.insert(0, way[0].all_input_nodes[0])
        launch = way.pop(0)
        if collectives.launch_kind(launch) not in collectives.REDUCTIONS or not way:
            return None
        if launch not in self.sent:
            self.sent[launch] = read(launch, self.writes)
        return ReducedValue(self.sent[launch], tuple(way))

    def _written(self, node: fx.Node, one: ReducedValue, other: ReducedValue) -> str:
        """Who writes what is sent before the later launch, or writes the sum, in whose place the reduction's result is read."""
        end = max(_place(one), _place(other))
        for reduced in (one, other):
            # A launch in ``added`` sends a sum that was made here, which nobody else can write.
            was = reduced.sent.tensors[0]
            if reduced.launch not in self.added and (writer := self.writes.first(was, _place(reduced), end)) is not None:
                return f"{named(writer)} what {reduced.launch.name} sends, between both launches"
        writing = self.order.writing(node)
        return f"{named(self.order.nodes[writing[0]])} the sum" if writing else ""

    def _add(self, node: fx.Node, one: ReducedValue, other: ReducedValue) -> None:
        """Let the later launch send the sum of what both send; readers of the sum ``node`` then read its result."""
        # The later launch stays, in its place: what it sends is not made sooner, and what the earlier one sends is there by
        # then.
        first, last = sorted((one, other), key=_place)
        launch = last.launch
        meta = {key: value for key, value in launch.meta.items() if key not in ("val", LAUNCHES)}
        with self.graph.inserting_before(launch):
            make = NodeMaker(self.graph, fake_value(last.sends).fake_mode, meta)
            added = make(torch.ops.aten.add.Tensor, one.sends, other.sends)
        launch.replace_input_with(last.sends, added)
        brings_too(launch, first.launch)
        self.added.pop(first.launch, None)
        node.replace_all_uses_with(last.way[-1])
        for gone in (node, *filter(collectives.is_wait, reversed(first.way)), first.launch):
            erase(self.graph, gone)


def _place(reduced: ReducedValue) -> int:
    return reduced.sent.index
