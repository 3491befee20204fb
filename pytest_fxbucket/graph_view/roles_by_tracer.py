"""Roles for a graph that came without any, from marks that its tracer left on parameters and gradients; names of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.c10d import group_ranks, untwinned
from pytest_fxbucket.compat.fx import gradients_named
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.graph.modules import direction_of, module_path
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph_view.stacks import tree_of
from pytest_fxbucket.step.mesh import dims_text
from pytest_fxbucket.step.roles import Value

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph_view.tree import HeldParameter, Tree
    from pytest_fxbucket.step.roles import MeshDim


def bare_values(graph: fx.Graph) -> tuple[list[Value], list[Value]]:
    """Inputs and outputs of ``graph``: param and grad where the tracer says so, else value.

    A parameter that the tracer holds but does not name is called by its module: ``layers.0.wq.parameter``.
    """
    names = _parameter_names(graph)
    inputs = [
        _value("param" if node in names else "value", names.get(node, str(number)), node)
        for number, node in enumerate(graph.find_nodes(op="placeholder"))
    ]
    return inputs, _outputs(graph)


def group_names(graph: fx.Graph, mesh: Sequence[MeshDim] = ()) -> dict[str, str]:
    """A readable name of each process group in ``graph``: a dimension of ``mesh``, or ``2 ranks 4 apart``.

    If this process does not have the group, only the size is known, from its launches: ``2 ranks``. The text has no rank's
    number and no group's name, so it is the same on every rank. Groups of one text are numbered in order of their launches.
    """
    known: dict[str, str] = {}
    for node in graph.nodes:
        launch = read_launch(node)
        # An all-reduce does not say its group's size, but a later launch on the same group may.
        if launch is not None and (launch.group not in known or known[launch.group] == _UNKNOWN):
            known[launch.group] = _group_text(launch.group, launch.ranks, mesh)
    named: dict[str, str] = {}
    texts: dict[str, str] = {}
    for group, size in known.items():
        plain = untwinned(group)
        if plain not in texts:
            alike = sum(text == size or text.startswith(f"{size} #") for text in texts.values())
            texts[plain] = f"{size} #{alike + 1}" if alike else size
        named[group] = texts[plain] + (" (own)" if plain != group else "")
    return named


_UNKNOWN = "unknown ranks"


def _group_text(group: str, size: object, mesh: Sequence[MeshDim]) -> str:
    try:
        ranks = group_ranks(group)
    except KeyError:  # The graph is looked at in a process that does not have its groups.
        return f"{size} ranks" if isinstance(size, int) else _UNKNOWN
    return dims_text(ranks, mesh)


def _parameter_names(graph: fx.Graph) -> dict[fx.Node, str]:
    tree = tree_of(graph)
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for held in tree.parameters:
        if held.node is None or held.node.op != "placeholder":
            continue
        names[held.node] = _not_taken(_name(tree, held), taken)
        taken.add(names[held.node])
    return names


def _name(tree: Tree, held: HeldParameter) -> str:
    """FQN of a parameter; without one ``parameter`` behind its module's FQN, since names of inputs change with torch."""
    if held.fqn != held.input:
        return ".".join(module_path(held.fqn))
    return ".".join((*tree.path(held.owners[0]), "parameter")) if held.owners else "parameter"


def _not_taken(name: str, taken: set[str]) -> str:
    number = 1
    numbered = name
    while numbered in taken:
        number += 1
        numbered = f"{name}_{number}"
    return numbered


def _outputs(graph: fx.Graph) -> list[Value]:
    output = graph.output_node()
    nodes = returned(output)
    gradients = gradients_named(output, len(nodes))
    # The reading of a graph takes a node as forward if the loss needs it or, without a loss, if it has no mark of autograd. In
    # a graph with marks of other tracers only, all would be forward: so outputs of forward are given the role of the loss.
    unmarked = not any(node.meta.get("autograd_backward") for node in graph.nodes)
    return [_output(number, node, gradients[number], unmarked) for number, node in enumerate(nodes)]


def _output(number: int, node: Any, gradient: str | None, unmarked: bool) -> Value:
    if gradient is not None:
        return _value("grad", ".".join(module_path(gradient)), node)
    is_forward = unmarked and hasattr(node, "meta") and direction_of(node) == "forward"
    return _value("loss" if is_forward else "value", str(number), node)


def _value(role: Any, fqn: str, node: Any) -> Value:
    held = getattr(node, "meta", {}).get("val")
    shape: Sequence[Any] = getattr(held, "shape", ())
    return Value(role, fqn, tuple(shape), getattr(held, "dtype", None))
