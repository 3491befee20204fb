"""Captured steps of fixtures/plans/chunked.toml with one fault each, in what is made of the head's weight."""

from __future__ import annotations

import torch
from torch import fx

from pytest_fxbucket.step.roles import StepGraph
from suites.eager.editing import behind, gradient_of, insert, instead, launch_behind, waits_of
from suites.eager.wrong_captures import OUTSIDE, Fault

aten = torch.ops.aten


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
