"""Which nodes of a step update parameters: the optimizer's part of a graph, after the last gradient is reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.gradients import returned
from pytest_fxbucket.graph.ops import written_arguments

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value


def update_nodes(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> set[fx.Node]:
    """What writes a parameter in place or returns it anew, and what is computed for that alone.

    Not the loss, nor what a collective of more than one element needs: reducing a norm to clip by is part of the update.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = {node for node, value in zip(placeholders, inputs, strict=True) if value.role == "param"}
    results = [(node, value.role) for node, value in zip(returned(graph.output_node()), outputs, strict=True)]
    made = [node for node, role in results if role == "param" and node not in parameters]
    made += [user for node in parameters for user in node.users if node in written_arguments(user)]
    if not made:
        return set()
    needed = [node for node, role in results if role in ("loss", "grad") and hasattr(node, "all_input_nodes")]
    needed += [node for node in graph.nodes if launch_kind(node) is not None and not _is_scalar(node)]
    before = ancestors(needed)
    waits = {user for node in before if launch_kind(node) is not None for user in node.users}
    return ancestors(made) - before - waits - set(placeholders)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes`` and everything that they are made of."""
    found = set(nodes)
    queue = list(found)
    for node in queue:
        fresh = [source for source in node.all_input_nodes if source not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found


def _is_scalar(launch: fx.Node) -> bool:
    """Whether one element is sent: what arrives of a parameter may be one too, of a shard."""
    values = [source.meta.get("val") for source in launch.all_input_nodes]
    return all(value is not None and hasattr(value, "numel") and value.numel() == 1 for value in values)
