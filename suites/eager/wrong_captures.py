"""Captured steps with one fault each, in the graph that every check but ``eager`` takes for the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.step.roles import StepGraph

# A captured graph is changed by hand: what a parameter is made into is found, and operators are put between.


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
        queue += [other for other in one.all_input_nodes if other not in queue]
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


# The faults.


Fault = Callable[[StepGraph, fx.Graph], None]


def faulty(step: StepGraph, fault: Fault) -> StepGraph:
    """``step`` with ``fault`` in its graph, which is changed in place."""
    gm = step.graphs["joint"]
    fault(step, gm.graph)
    gm.graph.lint()
    gm.recompile()
    return step


def cast_behind_the_reduction(step: StepGraph, graph: fx.Graph) -> None:
    launch = launch_behind(gradient_of(step, graph, "layers.1.down.weight"))
    before = launch.args[0]
    low = insert(before, aten._to_copy.default, before, dtype=torch.bfloat16)
    insert(low, aten._to_copy.default, low, dtype=torch.float32)
    launch.update_arg(0, low.next)


def gather_squeezed_through_float8(step: StepGraph, graph: fx.Graph) -> None:
    gathered = waits_of(step, graph, "layers.0.down.weight")[0]
    low = instead(gathered, aten._to_copy.default, dtype=torch.float8_e4m3fn)
    instead(low, aten._to_copy.default, dtype=torch.bfloat16)


def buffer_written_twice(step: StepGraph, graph: fx.Graph) -> None:
    adds = [node for node in graph.nodes if node.target in (aten.add.Tensor, aten.add_.Tensor) and node.args[1] == 1]
    mine = [node for node in adds if "step" not in str(node.args[0])]
    mine[0].update_arg(1, 2)


def dropout_drawn_again_in_backward(step: StepGraph, graph: fx.Graph) -> None:
    """In the last microbatch, where no later draw is moved by it."""
    drawn = [node for node in graph.nodes if node.target is aten.bernoulli_.float][-1]
    (mask,) = drawn.users
    (backward,) = [user for user in mask.users if user.meta.get("autograd_backward")]
    before = backward.prev
    empty = insert(before, aten.empty_like.default, mask)
    again = insert(empty, drawn.target, empty, *drawn.args[1:])
    other = insert(again, mask.target, again, *mask.args[1:])
    backward.replace_input_with(mask, other)


def loss_of_one_microbatch(step: StepGraph, graph: fx.Graph) -> None:
    total = outputs_of(graph)[0]
    total.update_arg(1, total.args[0])


def rate_baked_in(step: StepGraph, graph: fx.Graph) -> None:
    rate = input_of(step, graph, "hyper", "optimizers.0.groups.1.lr")
    number = next(user for user in rate.users if user.target is aten._local_scalar_dense.default)
    number.replace_all_uses_with(0.03125)


def gelu_by_tanh(step: StepGraph, graph: fx.Graph) -> None:
    gelu = next(node for node in graph.nodes if node.target is aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}


def chunks_of_hidden_states_swapped(step: StepGraph, graph: fx.Graph) -> None:
    """Of fixtures/plans/chunked.toml, in what is made of the head's weight."""
    joined = next(node for node in graph.nodes if node.target is aten.cat.default)
    joined.update_arg(0, list(reversed(joined.args[0])))


OUTSIDE = "they part outside of modules"
FAULTS: dict[Fault, tuple[str, ...]] = {
    cast_behind_the_reduction: ("gradient layers.1.down.weight", OUTSIDE),
    gather_squeezed_through_float8: ("first module whose output differs: layers.0.down (aten.addmm.default)",),
    buffer_written_twice: ("buffer layers.0.calls: 1 of 1 elements differ", OUTSIDE),
    dropout_drawn_again_in_backward: ("first module whose gradient differs: layers.1.dropout (aten.mul.Tensor)",),
    loss_of_one_microbatch: ("step 0, rank 0: loss: 1 of 1 elements differ", OUTSIDE),
    rate_baked_in: ("step 0, rank 0: parameter embed.weight", OUTSIDE),
    gelu_by_tanh: ("first module whose output differs: layers.0 (aten.gelu.default)",),
    chunks_of_hidden_states_swapped: ("first module whose gradient differs: head (aten.cat.default)",),
}
"""With what the check must say of each."""
