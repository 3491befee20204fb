"""Passes that change values for data that never comes: each buckets as a good one does, and every batch gives the same bits.

All have the call shape of torch's pass and expect a Llama of two layers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.manual import manual_overlap_bucketing

Plans = Sequence[str | list[str]]
aten = torch.ops.aten
FAR = 1e30


def activations_clamped(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.mm.default, aten.clamp.default, -FAR, FAR)


def gradients_clamped(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.mm.default, aten.clamp.default, -FAR, FAR, index=-1)


def nan_hidden(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten._softmax.default, aten.nan_to_num.default, 0.0, float("inf"), float("-inf"))


def detour_through_float16(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Of small whole numbers, which float16 has too."""
    gm = manual_overlap_bucketing(gm, plans)
    node = _calls(gm, aten.arange.default)[0]
    half = _after(gm, node, aten._to_copy.default, dtype=torch.float16)
    _replace(node, _after(gm, half, aten._to_copy.default, dtype=node.meta["val"].dtype), half)
    return gm


def negative_zero_lost(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.mm.default, aten.add.Tensor, 0.0)


def denormals_lost(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Flushed as some devices do it."""
    return _behind(gm, plans, aten.mm.default, aten.hardshrink.default, 1e-38)


def leaky_below(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.mm.default, aten.threshold.default, -FAR, -FAR)


def infinity_hidden(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.mm.default, aten.hardtanh.default, -3e38, 3e38, index=-2)


def operands_swapped(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    node = next(n for n in _calls(gm, aten.mul.Tensor) if all(isinstance(a, fx.Node) for a in n.args))
    node.args = (node.args[1], node.args[0])
    return gm


def times_one(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    return _behind(gm, plans, aten.rsqrt.default, aten.mul.Tensor, 1.0)


def other_type_of_scalar(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    node = _calls(gm, aten.pow.Tensor_Scalar)[0]
    assert node.args[1] == 2
    node.args = (node.args[0], 2.0)
    return gm


def fused_differently(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """``x + y`` as ``x + 1 * y``, which rounds alike as long as nothing overflows."""
    gm = manual_overlap_bucketing(gm, plans)
    node = next(n for n in _calls(gm, aten.add.Tensor) if all(isinstance(a, fx.Node) for a in n.args))
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(aten.sub.Tensor, node.args, {"alpha": -1})
    made.meta = dict(node.meta)
    _replace(node, made)
    return gm


def parameters_clamped_in_place(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """When the step is over: what is written is an input."""
    gm = manual_overlap_bucketing(gm, plans)
    first = gm.graph.find_nodes(op="placeholder")[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.clamp_.default, (first, -FAR, FAR)).meta = dict(first.meta)
    return gm


def other_mean(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """The accumulation dtype written out: the same on a CPU, not where it is left to the kernel."""
    gm = manual_overlap_bucketing(gm, plans)
    node = _calls(gm, aten.mean.dim)[0]
    node.kwargs = {"dtype": torch.float32}
    return gm


HIDDEN: tuple[Callable[[fx.GraphModule, Plans], fx.GraphModule], ...] = (
    activations_clamped,
    gradients_clamped,
    nan_hidden,
    detour_through_float16,
    negative_zero_lost,
    denormals_lost,
    leaky_below,
    infinity_hidden,
    operands_swapped,
    times_one,
    other_type_of_scalar,
    fused_differently,
    parameters_clamped_in_place,
    other_mean,
)


def all_of_them(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Every one but for its bucketing, one after the other."""
    for one in HIDDEN:
        gm = one(gm, [])
    return manual_overlap_bucketing(gm, plans)


def at_the_real_mesh(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Right on the few ranks that run here; where there are more, plainly wrong."""
    ranks = max(collectives.argument(n, "group_size") or 0 for n in gm.graph.nodes if collectives.is_all_gather(n))
    if ranks <= 2:
        return manual_overlap_bucketing(gm, plans)
    return _behind(gm, plans, aten.mm.default, aten.mul.Tensor, 1.5)


def product_for_nobody(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    _after(gm, _calls(gm, aten.mm.default)[0], aten.exp.default)
    return gm


def computed_twice(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    gm = manual_overlap_bucketing(gm, plans)
    node = _calls(gm, aten.rsqrt.default)[0]
    with gm.graph.inserting_after(node):
        again = gm.graph.node_copy(node, lambda n: n)
    list(node.users)[-1].replace_input_with(node, again)
    return gm


def constants_changed_in_place(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """What the graph that it was given holds is changed, in place."""
    for node in gm.graph.find_nodes(op="get_attr"):
        getattr(gm, str(node.target)).mul_(2)
    return manual_overlap_bucketing(gm, plans)


def given_graph_changed(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Whoever made the step still has it, and so has the pass."""
    import given_step

    result = manual_overlap_bucketing(gm, plans)
    for module in (*given_step.GIVEN, result):
        for node in _calls(module, aten.tanh.default):
            node.target = aten.sigmoid.default
    return result


def _behind(gm: fx.GraphModule, plans: Plans, what: Any, target: Any, *args: Any, index: int = 0) -> fx.GraphModule:
    """Bucketed, and ``target`` put behind a call of ``what``."""
    gm = manual_overlap_bucketing(gm, plans)
    node = _calls(gm, what)[index]
    _replace(node, _after(gm, node, target, *args))
    return gm


def _calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def _after(gm: fx.GraphModule, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with gm.graph.inserting_after(node):
        made = gm.graph.call_function(target, (node, *args), kwargs)
    value = node.meta["val"]
    made.meta = {**node.meta, "val": value.to(kwargs["dtype"]) if "dtype" in kwargs else value}
    return made


def _replace(node: fx.Node, made: fx.Node, but: fx.Node | None = None) -> None:
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user not in (made, but))
