"""Captured steps with one fault each, in the graph that every check but ``eager`` takes for the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    return _reached(node, lambda one: one.all_input_nodes)


def in_front(node: fx.Node) -> list[fx.Node]:
    """What is made of ``node``, nearest first."""
    return _reached(node, lambda one: one.users)


def _reached(node: fx.Node, onward: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    queue = list(onward(node))
    for one in queue:
        queue += [other for other in onward(one) if other not in queue]
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


def _last_cast(total: fx.Node, through: fx.Node) -> fx.Node:
    return next(source for source in total.all_input_nodes if source is through or through in behind(source))


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
    rate_baked_in: ("step 0, rank 0: parameter embed.weight", OUTSIDE),
    gelu_by_tanh: ("first module whose output differs: layers.0 (aten.gelu.default)",),
    another_epsilon: ("first module whose output differs: layers.1.norm (aten.native_layer_norm.default)",),
    residual_without_gradient: ("first module whose gradient differs: layers.0.down",),
}
"""With what the check must say of each."""


# The same of fixtures/plans/chunked.toml, in what is made of the head's weight.


def chunks_reduced_one_by_one(step: StepGraph, graph: fx.Graph) -> None:
    """As where each read of the weight gathers it anew: first over ranks, then over chunks."""
    launch = launch_behind(gradient_of(step, graph, "head.weight"))
    (wait,) = launch.users
    last, reduced = wait, []
    for part in _added(_total(launch)):
        whole = insert(last, aten.clone.default, part, memory_format=torch.contiguous_format)
        sent = insert(whole, launch.target, whole, *launch.args[1:])
        last = insert(sent, wait.target, sent)
        reduced.append(last)
    _sum_instead(wait, reduced)


def chunks_added_from_first_to_last(step: StepGraph, graph: fx.Graph) -> None:
    """Autograd adds the last chunk's first."""
    total = _total(launch_behind(gradient_of(step, graph, "head.weight")))
    _sum_instead(total, _added(total)[::-1])


def last_chunk_lost(step: StepGraph, graph: fx.Graph) -> None:
    total = _total(launch_behind(gradient_of(step, graph, "head.weight")))
    total.replace_all_uses_with(total.args[0])


def slices_of_the_vocabulary_swapped(step: StepGraph, graph: fx.Graph) -> None:
    joined = next(one for one in behind(gradient_of(step, graph, "head.weight")) if one.target is aten.cat.default)
    joined.update_arg(0, list(reversed(joined.args[0])))


def chunks_of_hidden_states_swapped(step: StepGraph, graph: fx.Graph) -> None:
    joined = next(node for node in graph.nodes if node.target is aten.cat.default)
    joined.update_arg(0, list(reversed(joined.args[0])))


def gradient_of_the_tied_head_dropped(step: StepGraph, graph: fx.Graph) -> None:
    total = _total(launch_behind(gradient_of(step, graph, "embed.weight")))
    (read,) = [one for one in total.args if one.target is aten.embedding_dense_backward.default]
    total.replace_all_uses_with(read)


def gradient_of_the_tied_embedding_dropped(step: StepGraph, graph: fx.Graph) -> None:
    total = _total(launch_behind(gradient_of(step, graph, "embed.weight")))
    (head,) = [one for one in total.args if one.target is not aten.embedding_dense_backward.default]
    total.replace_all_uses_with(head)


def microbatches_added_in_bfloat16(step: StepGraph, graph: fx.Graph) -> None:
    """What was added before the last microbatch is rounded."""
    _round_first(_total(launch_behind(gradient_of(step, graph, "embed.weight"))))


def chunks_added_in_bfloat16(step: StepGraph, graph: fx.Graph) -> None:
    """What was added before the last chunk is rounded, as where autograd adds them, and not FSDP2."""
    _round_first(_total(launch_behind(gradient_of(step, graph, "head.weight"))))


def loss_in_bfloat16(step: StepGraph, graph: fx.Graph) -> None:
    softmax = next(node for node in graph.nodes if node.target is aten._log_softmax.default)
    low = instead(softmax, aten._to_copy.default, dtype=torch.bfloat16)
    instead(low, aten._to_copy.default, dtype=torch.float32)


def logits_in_float32(step: StepGraph, graph: fx.Graph) -> None:
    """The cast in front of the product instead of behind it."""
    transposed = next(user for user in waits_of(step, graph, "head.weight")[0].users if user.target is aten.t.default)
    product = next(user for user in transposed.users if user.target is aten.mm.default)
    for place in (0, 1):
        product.update_arg(place, insert(product.args[place], aten._to_copy.default, product.args[place], dtype=torch.float32))


def _total(launch: fx.Node) -> fx.Node:
    return next(one for one in behind(launch) if one.target is aten.add.Tensor)


def _round_first(total: fx.Node) -> None:
    low = insert(total.args[0], aten._to_copy.default, total.args[0], dtype=torch.bfloat16)
    total.update_arg(0, insert(low, aten._to_copy.default, low, dtype=torch.float32))


def _added(total: fx.Node) -> list[fx.Node]:
    """What the chain of sums ``total`` adds, in order."""
    parts = [total]
    while parts[0].target is aten.add.Tensor:
        parts[:1] = parts[0].args
    return parts


def _sum_instead(node: fx.Node, parts: list[fx.Node]) -> None:
    """Let readers of ``node`` read the sum of ``parts``, which is made behind the last of them and ``node``."""
    users = list(node.users)
    place = {one: i for i, one in enumerate(node.graph.nodes)}
    last, total = max((node, *parts), key=place.__getitem__), parts[0]
    for part in parts[1:]:
        last = total = insert(last, aten.add.Tensor, total, part)
    for user in users:
        if user not in behind(total):
            user.replace_input_with(node, total)


UNTIED, TIED = "gradient head.weight", "gradient embed.weight"
LOSSES: dict[Fault, tuple[str | None, tuple[str, ...]]] = {
    chunks_reduced_one_by_one: ("fp32", (UNTIED, OUTSIDE)),
    chunks_added_from_first_to_last: ("fp32", (UNTIED, OUTSIDE)),
    last_chunk_lost: (None, (UNTIED, OUTSIDE)),
    slices_of_the_vocabulary_swapped: ("vocabulary", ("first module whose gradient differs: head (aten.cat.default)",)),
    chunks_of_hidden_states_swapped: (None, ("first module whose gradient differs: head (aten.cat.default)",)),
    gradient_of_the_tied_head_dropped: ("tied", (TIED, OUTSIDE)),
    gradient_of_the_tied_embedding_dropped: ("tied", (TIED, OUTSIDE)),
    microbatches_added_in_bfloat16: ("tied_accumulated", (TIED, OUTSIDE)),
    chunks_added_in_bfloat16: ("backward", (UNTIED, OUTSIDE)),
    loss_in_bfloat16: (None, ("first module whose output differs: head (aten.nll_loss_forward.default)",)),
    logits_in_float32: (None, ("first module whose output differs: head (aten.mm.default)",)),
}
"""Row of the plan, and what the check must say."""
