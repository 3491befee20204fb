"""Roles of what a program is given and returns, as a training step has them: ``param a.w``, ``state a.w.momentum``.

A program without them is a graph of which nothing is known but its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pytest_fxbucket.same.check import ends
from pytest_fxbucket.step.roles import Parameter, Role, StepGraph, Value

if TYPE_CHECKING:
    from torch import fx

_KEY = "fuzz_role"
MODULES = ("a", "b", "c")
"""What a drawn program launches for."""


def with_role(node: fx.Node, role: str) -> fx.Node:
    """``node``, an input, as that."""
    node.meta[_KEY] = role
    return node


def with_roles(output: fx.Node, roles: Sequence[str]) -> None:
    """What is returned by ``output`` as these, each by its place; none: nothing is said."""
    if roles:
        output.meta[_KEY] = list(roles)


def role_of(node: fx.Node) -> str:
    """Of an input; empty if nobody said it."""
    return str(node.meta.get(_KEY, ""))


def roles_of(output: fx.Node) -> list[str]:
    """Of what is returned; none if nobody said them."""
    return list(output.meta.get(_KEY, ()))


def step_of(graph_module: fx.GraphModule) -> StepGraph:
    """``graph_module`` as a step, with roles if it has them."""
    graph = graph_module.graph
    inputs, outputs = ends(graph)
    roles = roles_of(graph.output_node())
    if roles:
        given = graph.find_nodes(op="placeholder")
        inputs = [_as(value, role_of(node) or f"batch {node.name}") for value, node in zip(inputs, given, strict=True)]
        outputs = [_as(value, role) for value, role in zip(outputs, roles, strict=True)]
    parameters = tuple(_parameter(value) for value in inputs if value.role == "param")
    ways = {"joint": graph_module}, {"joint": tuple(inputs)}, {"joint": tuple(outputs)}
    return StepGraph(*ways, parameters, ("", *MODULES), (), 0)


def _as(value: Value, said: str) -> Value:
    role, _, fqn = said.partition(" ")
    return replace(value, role=cast("Role", role), fqn=fqn)


def _parameter(value: Value) -> Parameter:
    dtype: Any = value.dtype
    return Parameter(value.fqn, (), value.shape, value.shape, dtype, trainable=True)
