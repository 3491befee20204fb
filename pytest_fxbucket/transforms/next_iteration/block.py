"""What moves: from the reductions of the entries asked for, or why they cannot move, to new parameters and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.gradients import returned
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.graph.update_provenance import is_result
from pytest_fxbucket.graph.updates import UPDATED
from pytest_fxbucket.graph.walks import readers_of
from pytest_fxbucket.plan.selectors import entry_by_parameter

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.update_provenance import Reduction
    from pytest_fxbucket.plan.selectors import ResolvedEntry
    from pytest_fxbucket.step.roles import StepGraph, Value

NAME = "next_iteration"


def moved_reductions(everything: Sequence[Reduction], step: StepGraph, moved: Sequence[ResolvedEntry]) -> list[Reduction]:
    """Of ``everything`` the reductions of the entries ``moved``, in order of launch.

    Raises :class:`PassError` for an entry without any, for one that is reduced more than once in a step, and for a launch that
    carries anything else besides.
    """
    entry_of = entry_by_parameter(moved)
    found = [one for one in everything if not entry_of.keys().isdisjoint(one.fqns)]
    reduced = {fqn for one in found for fqn in one.fqns}
    for entry in moved:
        if reduced.isdisjoint(entry.parameters):
            raise PassError(f"{NAME}: entry {entry.name} cannot move: {_why_none(step, entry)}")
    for one in found:
        _refuse_company(one, entry_of)
    _refuse_again(found, entry_of)
    return found


def _refuse_company(one: Reduction, entry_of: dict[str, str]) -> None:
    """A launch goes as a whole."""
    others = [fqn for fqn in one.fqns if fqn not in entry_of]
    if not others:
        return
    entry = next(entry_of[fqn] for fqn in one.fqns if fqn in entry_of)
    what = f"the gradient of {others[0]}" if others[0] else "what is no parameter's gradient"
    raise PassError(
        f"{NAME}: entry {entry} cannot move: its reduction ({one.launch.name}) also carries {what}, which does not move; "
        "name what shares its bucket too, or give it a bucket of its own"
    )


def _refuse_again(found: Sequence[Reduction], entry_of: dict[str, str]) -> None:
    seen: dict[tuple[str, int], fx.Node] = {}
    for one in found:
        for fqn in one.fqns:
            before = seen.setdefault((fqn, one.level), one.launch)
            if before is not one.launch:
                raise PassError(
                    f"{NAME}: entry {entry_of[fqn]} cannot move: the gradient of {fqn} is reduced more than once in a step "
                    f"({before.name} and {one.launch.name}); add up the parts of microbatches and reduce their sum once"
                )


def _why_none(step: StepGraph, entry: ResolvedEntry) -> str:
    trained = [p.fqn for p in step.parameters if p.fqn in entry.parameters and p.trainable]
    if not trained:
        return "none of its parameters is trained"
    return f"no reduction brings the gradient of {trained[0]}, so there is nothing that could be hidden"


# What moves: the nodes from the reductions on to new parameters and state, and what they are given from elsewhere.
#
# Reductions and all that depends on them; new state that does not, as a step counter; and copies of what is made of parameters
# and state of the block, learning rates and numbers alone, and of what packs its gradients. Everything else that the block
# reads is carried.


@dataclass
class Block:
    """Nodes of a joint graph that move, all blocks together."""

    order: Order
    reductions: Sequence[Reduction]
    given: dict[fx.Node, Value]
    """Every input of the graph."""
    results: list[tuple[Any, Value]]
    """Every output of the graph: a node, or a constant."""
    entry_of: Mapping[str, str]
    """Entry of each parameter of those that move, of those without a reduction too."""
    nodes: set[fx.Node] = field(default_factory=set)
    """That run in the next call, and in this one no more."""
    copied: set[fx.Node] = field(default_factory=set)
    """That run in the next call, and in this one too if something else needs them."""

    def is_own(self, value: Value) -> bool:
        """Whether ``value`` is a parameter of an entry that moves, or its state: nobody else updates it."""
        owner = value.fqn if value.role == "param" else value.fqn.rpartition(".")[0]
        return value.role in UPDATED and owner in self.entry_of

    def entries(self, reductions: Iterable[Reduction]) -> list[str]:
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
    reductions: Sequence[Reduction],
    entry_of: Mapping[str, str],
) -> Block:
    """The block of ``reductions``; ``entry_of`` has all parameters of the entries that move. Nothing is refused here."""
    order = order_of(graph)
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    results = list(zip(returned(graph.output_node()), outputs, strict=True))
    block = Block(order, reductions, given, results, entry_of)
    block.nodes = readers_of(one.launch for one in reductions)
    for node, value in results:
        if block.is_own(value) and node not in block.nodes and node not in given:
            block.nodes |= readers_of([node])
    block.copied = _copied(block)
    return block


def _copied(block: Block) -> set[fx.Node]:
    """What packs gradients for the reductions, and what is made of the block's own inputs alone, as far as it needs them."""
    found: set[fx.Node] = set()
    queue = [one.launch for one in block.reductions if one.level == 0]
    makers = {maker for one in block.reductions for maker in one.makers}
    for node in queue:
        fresh = [
            s for s in node.all_input_nodes if s not in makers and s not in found and s not in block.nodes and _packs(block, s)
        ]
        found.update(fresh)
        queue.extend(fresh)
    made_of_own = _made_of_own(block)
    queue = [node for node in block.order.nodes if node in block.nodes or node in found]
    for node in queue:
        fresh = [s for s in node.all_input_nodes if s in made_of_own and s not in found and s not in block.nodes]
        found.update(fresh)
        queue.extend(fresh)
    return found


def _packs(block: Block, node: fx.Node) -> bool:
    if node.target is getitem:  # of an operator with several results, it is as that is
        return _packs(block, node.all_input_nodes[0])
    moves = node.op == "call_function" and moves_data(node) and not is_result(node)
    return moves and not block.order.writing(node)


def _made_of_own(block: Block) -> set[fx.Node]:
    """Nodes that give the same in the next call: pure, and made of nothing but the block's parameters, state and rates."""
    found: set[fx.Node] = set()
    for node in block.order.nodes:
        if node.op == "call_function" and node not in block.nodes and _is_pure(block, node):
            sources = node.all_input_nodes
            if all(s in found or _is_live(block, s) for s in sources):
                found.add(node)
    return found


def _is_live(block: Block, node: fx.Node) -> bool:
    value = block.given.get(node)
    return node.op == "get_attr" if value is None else value.role == "hyper" or block.is_own(value)


def _is_pure(block: Block, node: fx.Node) -> bool:
    does = effects_of(node)
    if does.writes or does.everything or does.random or does.chained or does.barrier or does.flight:
        return False
    return all(block.order.nodes[i] in block.nodes for i in block.order.writing(node))
