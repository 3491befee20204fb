"""Captured steps with one fault each, in the graph that every check but ``eager`` takes for the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.step.roles import StepGraph
from suites.eager.editing import behind, gradient_of, in_front, input_of, insert, instead, launch_behind, outputs_of, waits_of

aten = torch.ops.aten
Fault = Callable[[StepGraph, fx.Graph], None]


def faulty(step: StepGraph, fault: Fault) -> StepGraph:
    """``step`` with ``fault`` in its graph, which is changed in place."""
    gm = step.graphs["joint"]
    fault(step, gm.graph)
    gm.graph.lint()
    gm.recompile()
    return step


def gradient_divided_twice(step: StepGraph, graph: fx.Graph) -> None:
    instead(gradient_of(step, graph, "layers.0.up.weight"), aten.div.Tensor, 2)


def gradient_not_divided(step: StepGraph, graph: fx.Graph) -> None:
    launch = launch_behind(gradient_of(step, graph, "layers.0.up.weight"))
    launch.update_arg(1, "sum")


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


def another_parameter_read(step: StepGraph, graph: fx.Graph) -> None:
    first, second = (waits_of(step, graph, f"layers.{layer}.up.weight")[0] for layer in (0, 1))
    second.replace_all_uses_with(first)


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


def first_microbatch_lost(step: StepGraph, graph: fx.Graph) -> None:
    launch = launch_behind(gradient_of(step, graph, "embed.weight"))
    total = next(node for node in behind(launch) if node.target is aten.add.Tensor)
    first: Any = total.args[0]
    total.update_arg(0, insert(first, aten.mul.Tensor, first, 0))


def clipped_by_local_norms(step: StepGraph, graph: fx.Graph) -> None:
    launch = next(node for node in graph.nodes if collectives.launch_kind(node) == "all_reduce")
    (wait,) = launch.users
    wait.replace_all_uses_with(launch.args[0])
    graph.erase_node(wait)
    graph.erase_node(launch)


def no_decay(step: StepGraph, graph: fx.Graph) -> None:
    parameter = input_of(step, graph, "param", "head.weight")
    decayed = next(user for user in parameter.users if user.target is aten.mul.Tensor)
    decayed.update_arg(1, 1.0)


def decay_of_the_other_group(step: StepGraph, graph: fx.Graph) -> None:
    """A norm's weight shrinks, too."""
    norm = input_of(step, graph, "param", "layers.0.norm.weight")
    new = next(user for user in norm.users if user.target is aten.addcdiv.default)
    new.update_arg(0, insert(norm, aten.mul.Tensor, norm, 0.99))
    new.args[0].prev.append(new.args[0])


def rate_baked_in(step: StepGraph, graph: fx.Graph) -> None:
    rate = input_of(step, graph, "hyper", "optimizers.0.groups.1.lr")
    number = next(user for user in rate.users if user.target is aten._local_scalar_dense.default)
    number.replace_all_uses_with(0.03125)


def gelu_by_tanh(step: StepGraph, graph: fx.Graph) -> None:
    gelu = next(node for node in graph.nodes if node.target is aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}


def another_epsilon(step: StepGraph, graph: fx.Graph) -> None:
    norm = [node for node in graph.nodes if node.target is aten.native_layer_norm.default][1]
    norm.update_arg(4, 1e-3)


def residual_without_gradient(step: StepGraph, graph: fx.Graph) -> None:
    """What flows around the second layer is lost."""
    norm = next(node for node in graph.nodes if node.target is aten.native_layer_norm_backward.default)
    through = next(user for user in norm.users if user.args[1] == 0)
    total = next(node for node in in_front(through) if node.target is aten.add.Tensor)
    total.replace_all_uses_with(_last_cast(total, through))


OUTSIDE = "they part outside of modules"
FAULTS: dict[Fault, tuple[str, ...]] = {
    gradient_divided_twice: ("gradient layers.0.up.weight", OUTSIDE),
    gradient_not_divided: ("gradient layers.0.up.weight", OUTSIDE),
    cast_behind_the_reduction: ("gradient layers.1.down.weight", OUTSIDE),
    gather_squeezed_through_float8: ("first module whose output differs: layers.0.down (aten.addmm.default)",),
    another_parameter_read: ("first module whose output differs: layers.1.up (aten.addmm.default)",),
    buffer_written_twice: ("buffer layers.0.calls: 1 of 1 elements differ", OUTSIDE),
    dropout_drawn_again_in_backward: ("first module whose gradient differs: layers.1.dropout (aten.mul.Tensor)",),
    loss_of_one_microbatch: ("step 0, rank 0: loss: 1 of 1 elements differ", OUTSIDE),
    first_microbatch_lost: ("gradient embed.weight", OUTSIDE),
    clipped_by_local_norms: ("parameter embed.weight", OUTSIDE),
    no_decay: ("parameter head.weight", OUTSIDE),
    decay_of_the_other_group: ("parameter layers.0.norm.weight", OUTSIDE),
    rate_baked_in: ("step 1, rank 0: parameter embed.weight", OUTSIDE),
    gelu_by_tanh: ("first module whose output differs: layers.0 (aten.gelu.default)",),
    another_epsilon: ("first module whose output differs: layers.1.norm (aten.native_layer_norm.default)",),
    residual_without_gradient: ("first module whose gradient differs: layers.0.down",),
}
"""With what the check must say of each."""


def _last_cast(total: fx.Node, through: fx.Node) -> fx.Node:
    return next(source for source in total.all_input_nodes if source is through or through in behind(source))
