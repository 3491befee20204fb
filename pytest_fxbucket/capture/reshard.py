"""Resharding after forward, done on the graph: backward reads a gather of its own instead of the forward one's result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from pytest_fxbucket.capture.names import names_of
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import is_all_gather, is_wait
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.movement import joins, moves_data
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.graph.walks import ancestors, readers_of
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selectors import GatherAgain, entry_by_parameter, kept_entries
from pytest_fxbucket.step.roles import Value


def gather_again_in_backward(graph: fx.Graph, batch: Collection[fx.Node] = ()) -> None:
    """Clone each unshard before its first reader in backward: cast, all-gather, wait, and the views and casts that are read.

    ``batch`` are inputs of the graph. A gather of what is made of them is no unshard: its clone would need forward once more.
    """
    # First each node finds its place, from the last node to the first: before its first reader in backward, where a node that
    # is cloned too counts by the place of its clone. Then nodes are cloned in graph order, so a clone's sources are cloned
    # before it. At last readers in backward are given the clones.
    position = {node: i for i, node in enumerate(graph.nodes)}
    unsharded = _unsharded(graph, readers_of(batch))
    first: dict[fx.Node, fx.Node] = {}
    """By node, the backward node that its clone must stand before."""
    for node in reversed(unsharded):
        readers = {first.get(user, user) for user in node.users if user in first or _is_backward(user)}
        if readers:
            first[node] = min(readers, key=position.__getitem__)
    clones: dict[fx.Node, fx.Node] = {}
    for node in (node for node in unsharded if node in first):
        with graph.inserting_before(first[node]):
            clone = graph.node_copy(node, lambda source: clones.get(source, source))
        clone.meta = {key: value for key, value in node.meta.items() if key != "nn_module_stack"}
        clone.meta["fwd_nn_module_stack"] = node.meta.get("nn_module_stack", {})
        clone.meta["autograd_backward"] = True
        clones[node] = clone
    for node, clone in clones.items():
        for user in list(node.users):
            if _is_backward(user):
                user.replace_input_with(node, clone)


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward")) or node.op == "output"


def _unsharded(graph: fx.Graph, activations: Collection[fx.Node]) -> list[fx.Node]:
    """All-gathers of parameters, the nodes from the shard to what they send, and what only moves or casts results; in order."""
    inputs = set(graph.find_nodes(op="placeholder"))
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_all_gather(node) and node not in activations:
            found |= ancestors([node], inputs)
        # Views and casts are made again as well: else their results would be kept for backward in place of what was gathered.
        elif not _is_backward(node) and _moves(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return [node for node in graph.nodes if node in found]


def _moves(node: fx.Node) -> bool:
    """Whether ``node`` gives what its inputs hold, as another view or in another dtype."""
    if not node.all_input_nodes or written_arguments(node):
        return False
    return is_wait(node) or (moves_data(node) and not joins(node))


# Which parameters stay gathered from forward to backward, told from the plan and from the step that was traced.


@dataclass(frozen=True, slots=True)
class Resharding:
    """What a plan asks for, and the entry of each planned parameter."""

    gather_again: GatherAgain = None
    entry_of: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    """The entry of what no other one has, if there is one."""

    def kept_gathered(self, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> set[str]:
        """FQNs of those parameters among the ``inputs`` of the joint ``graph`` whose gathers backward reads too."""
        parameters = {value.fqn for value in inputs if value.role == "param"}
        if isinstance(self.gather_again, bool):
            return set() if self.gather_again else parameters
        if not self.entry_of:
            return set()
        last = read_graph(graph, inputs, outputs).last_read(self.entry_of)
        roots = last and self.entry_of[last], self.root
        kept = kept_entries(self.gather_again, list(dict.fromkeys(self.entry_of.values())), roots)
        return {fqn for fqn in parameters if self.entry_of.get(fqn) in kept}


def resharding_of(model: nn.Module, plan: Plan) -> Resharding:
    """What ``plan`` asks for. Raises PlanError for a table that names no entry."""
    try:
        entries = entries_of(plan, names_of(model), [fqn for fqn, _ in model.named_modules()]).entries
    except PlanError:  # entries that cannot be resolved are told by each check that needs them
        return Resharding(plan.parallel.reshard_after_forward, {})
    try:
        kept_entries(plan.parallel.reshard_after_forward, [entry.name for entry in entries], ())
    except PlanError as error:
        raise PlanError(f"{plan.path}: {error}") from None
    return Resharding(plan.parallel.reshard_after_forward, entry_by_parameter(entries), plan.bucket.root)
