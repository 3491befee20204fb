"""Gradients that a model's own movement of data ends in: joined from pieces, sliced, expanded, permuted, before they are sent.

Backward of a weight that is read in chunks, or summed, gives such. What is sent then begins where the gradient is whole: a pack
reads it there, and what is done before is the model's, as compute is. Which nodes those are is read off the graph that a pass
is given, where each launch sends one gradient; in the graph that comes out they are known by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.sending import UNEVEN

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.follow import Followed

_CASTS = ("aten::_to_copy", "prims::convert_element_type")


def begun_in(found: Followed) -> set[fx.Node]:
    """Nodes that only move data, at which a gradient begins whose pieces cannot be told from where they were computed."""
    return {
        node for launch, sent in found.sent.items() if sent.problem == UNEVEN for node in _gradient(launch) if moves_data(node)
    }


def named_in(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """The nodes called ``names`` that are left in ``graph``."""
    return {node for node in graph.nodes if node.name in names} if names else set()


def _gradient(launch: fx.Node) -> Iterator[fx.Node]:
    """What the reduce-scatter ``launch`` sends, before it was cast."""
    node: Any = collectives.sent_by(launch)
    if collectives.launch_kind(launch) != "reduce_scatter" or isinstance(node, (list, tuple)):
        return
    while operator_name(node) in _CASTS:
        (node,) = node.all_input_nodes
    yield node
