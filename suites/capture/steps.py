"""Steps captured from models of capture_models, what their graphs hold, and where errors of users' code come from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Model, Parallel
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph


def plan_of(
    factory: str, *, batch: str = "batch", loss: str = "loss", args: Any = None, of: str = "capture_models", **parallel: Any
) -> Plan:
    name, _, kind = factory.partition(" ")
    model = Model(f"{of}:{name}", f"{of}:{batch}", {"kind": kind} if kind else args or {}, f"{of}:{loss}")
    return Plan(Path("plan.toml"), model=model, parallel=Parallel(**{"dp_shard": 4, **parallel}))


def captured(factory: str, *, ranks: int = 4, rank: int = 0, **rest: Any) -> StepGraph:
    return capture_plan(plan_of(factory, **rest), shard_mesh(ranks), rank)


def at(function: Callable[..., Any], text: str) -> str:
    """``file:line in function`` of the line of ``function`` that begins with ``text``."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if line.strip().startswith(text))
    path = Path(inspect.getsourcefile(function) or "").relative_to(Path.cwd())
    return f"{path.as_posix()}:{first + number} in {function.__name__}"


def launches(step: StepGraph, kind: str, direction: str = "") -> list[fx.Node]:
    found = [node for node in step.graphs["joint"].graph.nodes if launch_kind(node) == kind]
    return [node for node in found if not direction or is_backward(node) == (direction == "backward")]


def is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def module_of(node: fx.Node) -> str | None:
    """FQN of the module a node is named after; None for a node without a name."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack)[-1] if stack else None


def sent_by(step: StepGraph) -> dict[fx.Node, str]:
    """FQN of the parameter that each all-gather carries, by walking back to its placeholder."""
    graph = step.graphs["joint"].graph
    names = dict(zip([n for n in graph.nodes if n.op == "placeholder"], step.inputs["joint"], strict=True))
    found = {}
    for node in launches(step, "all_gather"):
        source = node.all_input_nodes[0]
        while source.op != "placeholder":
            (source,) = source.all_input_nodes
        found[node] = names[source].fqn
    return found


def made_by(step: StepGraph) -> dict[fx.Node, str]:
    """FQN of the gradient that each reduce-scatter gives, by walking back from the output."""
    found = {}
    outputs = step.graphs["joint"].graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    for node, value in zip(outputs, step.outputs["joint"], strict=True):
        while value.role == "grad" and isinstance(node, fx.Node) and launch_kind(node) != "reduce_scatter":
            (node,) = node.all_input_nodes
        if value.role == "grad":
            assert isinstance(node, fx.Node)
            found[node] = value.fqn
    return found
