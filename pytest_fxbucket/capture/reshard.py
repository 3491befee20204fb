"""Resharding after forward, done on the graph: backward reads a gather of its own instead of the forward one's result."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import is_all_gather, is_wait
from pytest_fxbucket.graph.ops import is_view

if TYPE_CHECKING:
    from torch import fx


def gather_again_in_backward(graph: fx.Graph, batch: Collection[fx.Node] = ()) -> None:
    """Clone each unshard (cast, all-gather, wait, and the views that backward needs) before its first reader in backward.

    A gather of what is made of ``batch``, inputs of the graph, is no unshard: again it would take the forward before it, too.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    activations = _made_of(graph, batch)
    for gather in [node for node in graph.nodes if is_all_gather(node) and node not in activations]:
        family = _family(gather)
        readers = sorted({user for member in family for user in member.users if _is_backward(user)}, key=position.__getitem__)
        if readers:
            _clone_before(graph, _chain_for(readers, family, gather), readers)


def _made_of(graph: fx.Graph, inputs: Collection[fx.Node]) -> set[fx.Node]:
    found = set(inputs)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward")) or node.op == "output"


def _family(gather: fx.Node) -> list[fx.Node]:
    """The gather, its wait, and every forward view of what arrived."""
    family = {gather: None}
    queue = [gather]
    for node in queue:
        for user in node.users:
            if user not in family and not _is_backward(user) and (is_wait(user) or is_view(user)):
                family[user] = None
                queue.append(user)
    return list(family)


def _chain_for(readers: list[fx.Node], family: list[fx.Node], gather: fx.Node) -> list[fx.Node]:
    """What must be cloned for ``readers``: their inputs in the family, back to the shard, in order of computation."""
    members = set(family)
    chain: list[fx.Node] = []

    def add(node: fx.Node) -> None:
        if node.op == "placeholder" or node in chain:
            return
        for source in node.all_input_nodes:
            if node is gather or source in members or node not in members:
                add(source)
        chain.append(node)

    for reader in readers:
        for source in reader.all_input_nodes:
            if source in members:
                add(source)
    return chain


def _clone_before(graph: fx.Graph, chain: list[fx.Node], readers: list[fx.Node]) -> None:
    clones: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(readers[0]):
        for node in chain:
            clone = graph.node_copy(node, lambda source: clones.get(source, source))
            clone.meta = {key: value for key, value in node.meta.items() if key != "nn_module_stack"}
            clone.meta["fwd_nn_module_stack"] = node.meta.get("nn_module_stack", {})
            clone.meta["autograd_backward"] = True
            clones[node] = clone
    for reader in readers:
        for source in list(reader.all_input_nodes):
            if source in clones:
                reader.replace_input_with(source, clones[source])
