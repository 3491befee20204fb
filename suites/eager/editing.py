"""Changes a captured graph by hand: finds what a parameter is made into, and puts operators between."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.step.roles import StepGraph

aten = torch.ops.aten


def outputs_of(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])


def gradient_of(step: StepGraph, graph: fx.Graph, fqn: str) -> fx.Node:
    values = step.outputs["joint"]
    return next(n for v, n in zip(values, outputs_of(graph), strict=True) if (v.role, v.fqn) == ("grad", fqn))


def input_of(step: StepGraph, graph: fx.Graph, role: str, fqn: str) -> fx.Node:
    places = graph.find_nodes(op="placeholder")
    return next(n for v, n in zip(step.inputs["joint"], places, strict=True) if (v.role, v.fqn) == (role, fqn))


def waits_of(step: StepGraph, graph: fx.Graph, fqn: str) -> list[fx.Node]:
    """What the gathers of a parameter bring, in order."""
    found, queue = [], [input_of(step, graph, "param", fqn)]
    for node in queue:
        for user in node.users:
            if collectives.is_wait(user):
                found.append(user)
            elif user.target is aten._to_copy.default or collectives.is_all_gather(user):
                queue.append(user)
    return found


def behind(node: fx.Node) -> list[fx.Node]:
    """What ``node`` is made of, nearest first."""
    queue = list(node.all_input_nodes)
    for one in queue:
        queue += [source for source in one.all_input_nodes if source not in queue]
        if len(queue) > 200:
            break
    return queue


def in_front(node: fx.Node) -> list[fx.Node]:
    """What is made of ``node``, nearest first."""
    queue = list(node.users)
    for one in queue:
        queue += [user for user in one.users if user not in queue]
        if len(queue) > 200:
            break
    return queue


def launch_behind(node: fx.Node) -> fx.Node:
    return next(one for one in behind(node) if collectives.launch_kind(one) == "reduce_scatter")


def _like(graph: fx.Graph, model: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta.update(model.meta)
    return node


def insert(behind: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with behind.graph.inserting_after(behind):
        node = _like(behind.graph, behind, target, *args, **kwargs)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    node.meta["val"] = target(*values, **kwargs)
    return node


def instead(node: fx.Node, target: Any, *more: Any, **kwargs: Any) -> fx.Node:
    """Let readers of ``node`` read ``target(node, *more)``."""
    made = insert(node, target, node, *more, **kwargs)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made
