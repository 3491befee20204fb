"""The block that moves: from reductions of the entries asked for to new parameters and state; or why it may not move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import waits_of
from pytest_fxbucket.graph.compute import is_reduced
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name, returned
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.graph.update_provenance import ON_LISTS, GradientReduction, is_result
from pytest_fxbucket.graph.updates import UPDATED, readiness
from pytest_fxbucket.graph.walks import ancestors, reached, readers_of
from pytest_fxbucket.plan.selectors import ResolvedEntry, entry_by_parameter
from pytest_fxbucket.step.roles import StepGraph, Value

NAME = "next_iteration"


def moved_reductions(
    everything: Sequence[GradientReduction], step: StepGraph, moved: Sequence[ResolvedEntry]
) -> list[GradientReduction]:
    """The reductions among ``everything`` that belong to the entries ``moved``, in order of launch.

    Raises :class:`PassError` for an entry without a reduction, for an entry that is reduced more than once in a step, and for a
    launch that also carries something that does not move.
    """
    entry_of = entry_by_parameter(moved)
    found = [one for one in everything if not entry_of.keys().isdisjoint(one.fqns)]
    reduced = {fqn for one in found for fqn in one.fqns}
    for entry in moved:
        if reduced.isdisjoint(entry.parameters):
            trained = [p.fqn for p in step.parameters if p.fqn in entry.parameters and p.trainable]
            why = "none of its parameters is trained"
            if trained:
                why = f"no reduction brings the gradient of {trained[0]}, so there is nothing that could be hidden"
            raise PassError(f"{NAME}: entry {entry.name} cannot move: {why}")
    for one in found:  # a launch goes as a whole
        others = [fqn for fqn in one.fqns if fqn not in entry_of]
        if others:
            first = next(entry_of[fqn] for fqn in one.fqns if fqn in entry_of)
            what = f"the gradient of {others[0]}" if others[0] else "what is no parameter's gradient"
            raise PassError(
                f"{NAME}: entry {first} cannot move: its reduction ({one.launch.name}) also carries {what}, which does not "
                "move; name what shares its bucket too, or give it a bucket of its own"
            )
    seen: dict[tuple[str, int], fx.Node] = {}
    for one in found:
        for fqn in one.fqns:
            before = seen.setdefault((fqn, one.level), one.launch)
            if before is not one.launch:
                raise PassError(
                    f"{NAME}: entry {entry_of[fqn]} cannot move: the gradient of {fqn} is reduced more than once in a step "
                    f"({before.name} and {one.launch.name}); add up the parts of microbatches and reduce their sum once"
                )
    return found


# The block that moves: the nodes from the reductions on to new parameters and state, and what they are given from elsewhere.
#
# It has three parts: reductions and all that depends on them; new state of the entries that depends on no reduction, as a step
# counter; and copies of nodes that can as well run in the next call. Those are nodes made only of the block's parameters and
# state, learning rates and constants, and nodes that pack its gradients. Everything else that the block reads is carried.


@dataclass
class Block:
    """Nodes of a joint graph that move, all blocks together."""

    order: Order
    reductions: Sequence[GradientReduction]
    input_values: dict[fx.Node, Value]
    """Every input of the graph."""
    results: list[tuple[Any, Value]]
    """Every output of the graph: a node, or a constant."""
    entry_of: Mapping[str, str]
    """Entry of each parameter of the entries that move, whether it has a reduction or not."""
    nodes: set[fx.Node] = field(default_factory=set)
    """Nodes that run in the next call only."""
    copied: set[fx.Node] = field(default_factory=set)
    """Nodes that run in the next call, and also in this one if something else needs them."""

    def is_own(self, value: Value) -> bool:
        """Whether ``value`` is a parameter of an entry that moves, or state of one: only the block updates it."""
        owner = value.fqn if value.role == "param" else value.fqn.rpartition(".")[0]
        return value.role in UPDATED and owner in self.entry_of

    def entries(self, reductions: Iterable[GradientReduction]) -> list[str]:
        """Entries of what ``reductions`` bring, in order."""
        return list(dict.fromkeys(self.entry_of[fqn] for one in reductions for fqn in one.fqns))

    @property
    def running(self) -> list[fx.Node]:
        """All nodes of the next call's part, in order."""
        return [node for node in self.order.nodes if node in self.nodes or node in self.copied]

    def fed(self) -> dict[fx.Node, None]:
        """What the block is given from elsewhere, in order of its first reader: inputs, attributes and values to carry."""
        found: dict[fx.Node, None] = {}
        for node in self.running:
            found.update(dict.fromkeys(s for s in node.all_input_nodes if s not in self.nodes and s not in self.copied))
        return found


def block_of(
    graph: fx.Graph,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    reductions: Sequence[GradientReduction],
    entry_of: Mapping[str, str],
) -> Block:
    """The block of ``reductions``; ``entry_of`` has all parameters of the entries that move. Nothing is refused here."""
    order = order_of(graph)
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    results = list(zip(returned(graph.output_node()), outputs, strict=True))
    block = Block(order, reductions, given, results, entry_of)
    block.nodes = readers_of(one.launch for one in reductions)
    # New state that needs no gradient, as a step counter, moves too: its next value belongs with the update that moved.
    for node, value in results:
        if block.is_own(value) and node not in block.nodes and node not in given:
            block.nodes |= readers_of([node])
    block.copied = _copied(block)
    return block


def _copied(block: Block) -> set[fx.Node]:
    """Nodes that pack gradients for the reductions, and nodes made only of the block's own inputs, as far as it needs them."""
    # Packing moves along, so that calls hand on the gradients themselves, each known by its parameter, and no packed buffer.
    makers = {maker for one in block.reductions for maker in one.makers} | block.nodes
    launches = [one.launch for one in block.reductions if one.level == 0]

    def packing_for(node: fx.Node) -> Iterable[fx.Node]:
        return (source for source in node.all_input_nodes if source not in makers and _packs(block, source))

    packing = set(reached(launches, packing_for)).difference(launches)
    own = _made_of_own(block) - block.nodes
    return set(reached([*block.nodes, *packing], lambda node: own.intersection(node.all_input_nodes))) - block.nodes


def _packs(block: Block, node: fx.Node) -> bool:
    if node.target is getitem:  # the operator whose result it picks decides
        return _packs(block, node.all_input_nodes[0])
    moves = node.op == "call_function" and moves_data(node) and not is_result(node)
    return moves and not block.order.writing(node)


def _made_of_own(block: Block) -> set[fx.Node]:
    """Nodes that give the same in the next call: pure, and made of nothing but the block's parameters, state and rates.

    Only the block updates its parameters and state, so until it runs in the next call they are what they were in this one.
    """
    live = {node for node, value in block.input_values.items() if value.role == "hyper" or block.is_own(value)}
    found: set[fx.Node] = set()
    for node in block.order.nodes:
        if node.op == "get_attr":
            live.add(node)
        does = effects_of(node)
        if node.op != "call_function" or node in block.nodes or does.acts or does.flight:
            continue
        is_pure = all(block.order.nodes[i] in block.nodes for i in block.order.writing(node))
        if is_pure and all(source in found or source in live for source in node.all_input_nodes):
            found.add(node)
    return found


# Why a block may not move: another result would come a call late, a value would be read too early, or others write its memory.


_CALLED = {"grad": "the gradient of", "param": "parameter", "state": "state", "buffer": "buffer", "loss": "the loss"}
Why = tuple["fx.Node", str]
"""A node of the block, and why it keeps the block from moving."""


def refuse_illegal(block: Block, everything: Sequence[GradientReduction]) -> None:
    """Raise :class:`PassError`, one sentence that names an entry and the reason, for a block that may not move.

    ``everything``: all reductions of the graph.
    """
    found = (why for rule in (_not_updated, _accumulating, _drawing, _writes, _crossing, _uncarried) for why in rule(block))
    for node, why in (*_late_outputs(block, everything), *found):
        behind = ancestors([node])
        # A node that is made of no reduction, as a step counter, keeps all of them from moving.
        entries = block.entries([one for one in block.reductions if one.launch in behind] or block.reductions)
        raise PassError(f"{NAME}: {'entry' if len(entries) == 1 else 'entries'} {' and '.join(entries)} cannot move: {why}")


def _late_outputs(block: Block, everything: Sequence[GradientReduction]) -> Iterator[Why]:
    """Results of the block that the step must give in its own call."""
    for node, value in block.results:
        if node not in block.nodes or block.is_own(value) or (value.role == "grad" and value.fqn in block.entry_of):
            continue
        if value.role in UPDATED:
            yield node, _why_joined(block, node, value, everything)
        elif value.role == "grad":
            yield node, f"the gradient of {value.fqn}, which does not move, is made of its reduced gradients, as by clipping"
        else:
            yield (
                node,
                f"{_named(value)}, which the step gives, is made of its reduced gradients, and would be of the call before",
            )


def _why_joined(block: Block, node: fx.Node, value: Value, everything: Sequence[GradientReduction]) -> str:
    """Which node makes an update that does not move depend on one that does."""
    order = block.order
    # Each wait is labelled by side, moving or not; :func:`readiness` then says which node is the first that joins both.
    moving = {one.launch for one in block.reductions}
    waits = {
        order.index[wait]: "what moves" if one.launch in moving else "the rest"
        for one in everything
        for wait in waits_of(one.launch)
        if any(one.fqns)
    }
    updating = {order.index[one] for one in block.nodes if one not in moving and order.index[one] not in waits}
    ready = readiness(order, updating, waits).get(order.index[node])
    joint = order.nodes[ready.joins] if ready is not None and ready.joins >= 0 else None
    if joint is None:
        return f"{_named(value)}, which does not move, is made of what it updates"
    if is_reduced(joint) or "norm" in operator_name(joint) or operator_name(joint) in ("aten::stack", "aten::cat"):
        return (
            f"the update of {value.fqn} needs its reduction too ({joint.name} makes one value of all gradients, as clipping by "
            "their norm does), and clipping waits for all reductions; set [step] clip_norm = 0"
        )
    if operator_name(joint).startswith(ON_LISTS):
        return (
            f"{joint.name} updates {value.fqn} together with it, and that does not move; "
            '[optimizer] groups = "entry" gives each entry its own'
        )
    return f"the update of {value.fqn}, which does not move, needs its reduction too ({joint.name})"


def _not_updated(block: Block) -> Iterator[Why]:
    updated = {block.entry_of[value.fqn] for _, value in block.results if value.role == "param" and block.is_own(value)}
    for one in block.reductions:
        if idle := next((entry for entry in block.entries([one]) if entry not in updated), None):
            yield one.launch, f"the step does not update {idle}, so nothing could follow its reduction; add [optimizer]"


def _accumulating(block: Block) -> Iterator[Why]:
    for node, value in block.input_values.items():
        if value.role == "grad" and value.fqn in block.entry_of:
            yield node, f"the step adds to the gradient of {value.fqn} that was there before, which is a call late then"


def _drawing(block: Block) -> Iterator[Why]:
    for node in block.running:
        does = effects_of(node)
        if does.random:
            yield node, f"{node.name} draws random numbers, and would draw others behind those of its own step"
        elif does.barrier or does.chained:
            yield node, f"{node.name} {does.barrier or 'acts on the world'}, so nothing may pass it"


def _writes(block: Block) -> Iterator[Why]:
    """Memory that the block touches and that is written: by the block, if nobody else has it; by others, if it is no input."""
    order, own = block.order, set(block.running)
    touched = {storage for node in (*own, *block.fed()) for storage in order.storages(node)}
    # Sorted, so that of several writes always the same one is named.
    for storage in sorted(touched):
        writers = [order.nodes[i] for i in order.writers(storage)]
        if not writers:
            continue
        here = next((node for node in writers if node in own), None)
        others = [node for node in order.nodes if storage in order.storages(node) and node not in own]
        if here is not None and others:
            what = _named(block.input_values[others[0]]) if others[0] in block.input_values else others[0].name
            yield here, f"{here.name} writes {what} in place; let the step give new values"
        elif here is None and (lasting := next((n for n in others if n.op in ("placeholder", "get_attr")), None)) is not None:
            what = _named(block.input_values[lasting]) if lasting in block.input_values else str(lasting.target)
            yield writers[0], f"{writers[0].name} writes {what} in place, which its update reads; let the step give new values"


def _crossing(block: Block) -> Iterator[Why]:
    """Nodes that stay but must run after a node that moves, though they do not read it: the order of writes demands it."""
    # What packs gradients moves as a copy, which would read them as the call left them; in this call nodes may read it.
    order = block.order
    for node, before in zip(order.nodes, order.before, strict=True):
        if node in block.nodes or node.op == "output":
            continue
        unread = (order.nodes[i] for i in before if order.nodes[i] not in node.all_input_nodes)
        if late := next((one for one in unread if one in block.nodes or one in block.copied), None):
            yield late, f"{node.name} must stay behind {late.name}, since one writes in place what the other reads"


def _uncarried(block: Block) -> Iterator[Why]:
    for node in block.fed():
        is_value = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "get_attr" and not is_value:
            yield node, f"it reads {node.name} ({node.target}), which is no tensor that could be carried to the next call"


def _named(value: Value) -> str:
    return " ".join(filter(None, (_CALLED.get(value.role, value.role), value.fqn)))
