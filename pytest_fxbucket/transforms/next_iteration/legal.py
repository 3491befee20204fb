"""Why a block may not move: what else would come a call late, be read too early, or be written by others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import waits_of
from pytest_fxbucket.graph.compute import is_reduced
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.updates import UPDATED, readiness
from pytest_fxbucket.graph.walks import ancestors
from pytest_fxbucket.transforms.next_iteration.block import NAME

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.update_provenance import Reduction
    from pytest_fxbucket.step.roles import Value
    from pytest_fxbucket.transforms.next_iteration.block import Block

_ON_LISTS = ("aten::_foreach_", "aten::_fused_")
_CALLED = {"grad": "the gradient of", "param": "parameter", "state": "state", "buffer": "buffer", "loss": "the loss"}
Why = tuple["fx.Node", str]
"""A node of the block, and why that may not move."""


def refuse_illegal(block: Block, everything: Sequence[Reduction]) -> None:
    """Raise :class:`PassError`, one sentence that names an entry and the reason, for a block that may not move.

    ``everything``: all reductions of the graph.
    """
    found = (why for rule in (_not_updated, _accumulating, _drawing, _writes, _crossing, _uncarried) for why in rule(block))
    for node, why in (*_late_outputs(block, everything), *found):
        behind = ancestors([node])
        entries = block.entries([one for one in block.reductions if one.launch in behind] or block.reductions)
        raise PassError(f"{NAME}: {'entry' if len(entries) == 1 else 'entries'} {' and '.join(entries)} cannot move: {why}")


def _late_outputs(block: Block, everything: Sequence[Reduction]) -> Iterator[Why]:
    """What the step gives of the block, and must give in its own call."""
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


def _why_joined(block: Block, node: fx.Node, value: Value, everything: Sequence[Reduction]) -> str:
    """What makes an update that does not move need one that does."""
    order = block.order
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
    if operator_name(joint).startswith(_ON_LISTS):
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
    for node, value in block.given.items():
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
    """Memory that is written in place belongs to the block alone, or to what it is given by value."""
    order, own = block.order, set(block.running)
    touched = {storage for node in (*own, *block.fed()) for storage in order.storages(node)}
    for storage in sorted(touched):
        writers = [order.nodes[i] for i in order.writers(storage)]
        if not writers:
            continue
        here = next((node for node in writers if node in own), None)
        others = [node for node in order.nodes if storage in order.storages(node) and node not in own]
        if here is not None and others:
            what = _named(block.given[others[0]]) if others[0] in block.given else others[0].name
            yield here, f"{here.name} writes {what} in place; let the step give new values"
        elif here is None and (lasting := next((n for n in others if n.op in ("placeholder", "get_attr")), None)) is not None:
            what = _named(block.given[lasting]) if lasting in block.given else str(lasting.target)
            yield writers[0], f"{writers[0].name} writes {what} in place, which its update reads; let the step give new values"


def _crossing(block: Block) -> Iterator[Why]:
    """What stays and must come behind what moves, for other reasons than its inputs."""
    order = block.order
    for node, before in zip(order.nodes, order.before, strict=True):
        if node in block.nodes or node.op == "output":
            continue
        if late := next((order.nodes[i] for i in before if order.nodes[i] in block.nodes), None):
            yield late, f"{node.name} must stay behind {late.name}, since one writes in place what the other reads"


def _uncarried(block: Block) -> Iterator[Why]:
    for node in block.fed():
        is_value = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "get_attr" and not is_value:
            yield node, f"it reads {node.name} ({node.target}), which is no tensor that could be carried to the next call"


def _named(value: Value) -> str:
    return " ".join(filter(None, (_CALLED.get(value.role, value.role), value.fqn)))
