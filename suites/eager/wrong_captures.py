"""Captured steps with one fault each, in the graph that every check but ``eager`` takes for the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.step.roles import StepGraph

Fault = Callable[[StepGraph, fx.Graph], None]
aten = torch.ops.aten


def faulty(step: StepGraph, fault: Fault) -> StepGraph:
    """``step`` with ``fault`` in its graph, which is changed in place."""
    gm = step.graphs["joint"]
    fault(step, gm.graph)
    gm.graph.lint()
    gm.recompile()
    return step


def insert(behind: fx.Node, target: Any, *args: Any) -> fx.Node:
    with behind.graph.inserting_after(behind):
        node = behind.graph.call_function(target, args)
    node.meta.update(behind.meta)
    return node


def loss_and_buffer(step: StepGraph, graph: fx.Graph) -> None:
    """The loss is that of one microbatch twice, and a layer counts its first call as two; no gradient has any of it."""
    total = graph.output_node().args[0][0]
    total.update_arg(1, total.args[0])
    adds = [node for node in graph.nodes if node.target in (aten.add.Tensor, aten.add_.Tensor) and node.args[1] == 1]
    mine = [node for node in adds if "step" not in str(node.args[0])]
    mine[0].update_arg(1, 2)


def rate_baked_in(step: StepGraph, graph: fx.Graph) -> None:
    places = graph.find_nodes(op="placeholder")
    rates = [v.fqn == "optimizers.0.groups.1.lr" for v in step.inputs["joint"]]
    number = next(user for user in places[rates.index(True)].users if user.target is aten._local_scalar_dense.default)
    number.replace_all_uses_with(0.03125)


def gelu_by_tanh(step: StepGraph, graph: fx.Graph) -> None:
    gelu = next(node for node in graph.nodes if node.target is aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}


def dropout_drawn_again_in_backward(step: StepGraph, graph: fx.Graph) -> None:
    """In the last microbatch, where no later draw is moved by it."""
    drawn = [node for node in graph.nodes if node.target is aten.bernoulli_.float][-1]
    (mask,) = drawn.users
    (backward,) = [user for user in mask.users if user.meta.get("autograd_backward")]
    empty = insert(backward.prev, aten.empty_like.default, mask)
    again = insert(empty, drawn.target, empty, *drawn.args[1:])
    backward.replace_input_with(mask, insert(again, mask.target, again, *mask.args[1:]))


def chunks_added_from_first_to_last(step: StepGraph, graph: fx.Graph) -> None:
    """Of fixtures/plans/chunked.toml the head's gradients, of which autograd adds the last chunk's first."""
    gradients = [(v.role, v.fqn) == ("grad", "head.weight") for v in step.outputs["joint"]]
    queue = [graph.output_node().args[0][gradients.index(True)]]
    for node in queue:
        queue += node.all_input_nodes
    launch = next(node for node in queue if collectives.launch_kind(node) == "reduce_scatter")
    total = next(node for node in queue[queue.index(launch) :] if node.target is aten.add.Tensor)
    parts = [total]
    while parts[0].target is aten.add.Tensor:
        parts[:1] = parts[0].args
    made = parts[-1]
    for part in parts[-2::-1]:
        # Behind the sum that is there, where all parts are.
        made = insert(total if made is parts[-1] else made, aten.add.Tensor, made, part)
    sums = [node for node in queue if node.target is aten.add.Tensor]
    total.replace_all_uses_with(made, delete_user_cb=lambda user: user not in sums and user is not made)


OUTSIDE = "they part outside of modules"
FAULTS: dict[Fault, tuple[str, ...]] = {
    loss_and_buffer: ("rank 0: loss: 1 of 1 elements differ", "buffer layers.0.calls: 1 of 1 elements differ", OUTSIDE),
    rate_baked_in: ("step 0, rank 0: parameter embed.weight", OUTSIDE),
    gelu_by_tanh: ("first module whose output differs: layers.0 (aten.gelu.default)",),
    dropout_drawn_again_in_backward: ("first module whose gradient differs: layers.1.dropout (aten.mul.Tensor)",),
    chunks_added_from_first_to_last: ("gradient head.weight", OUTSIDE),
}
"""With what the check must say of each: which kinds of tensors differ, and where it is led."""
