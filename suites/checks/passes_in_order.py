"""Passes of a list, of which one breaks something in a bucketed MLP of :mod:`suites.checks.bitwise_models`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from pytest_fxbucket.graph import collectives

Plans = Sequence[str | list[str]]


def same(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Nothing is wrong with it."""
    return gm


def other_tanh(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """What tanh is given is another value by a little."""
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    with gm.graph.inserting_before(node):
        other = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 1 + 2**-20))
        other.meta = dict(node.meta)
    node.replace_input_with(node.args[0], other)
    return gm


def without_a_wait(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """A collective's result is read, and nobody waits for it."""
    wait = next(node for node in gm.graph.nodes if collectives.is_wait(node))
    wait.replace_all_uses_with(wait.all_input_nodes[0])
    gm.graph.erase_node(wait)
    return gm


def half_the_reductions(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """A reduction is done in another way than the plan has it."""
    launch = next(node for node in gm.graph.nodes if node.target is torch.ops._c10d_functional.reduce_scatter_tensor.default)
    launch.args = (launch.args[0], "sum", *launch.args[2:])
    return gm


def unreadable(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """A view asks for more elements than there are."""
    view = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.view.default)
    view.args = (view.args[0], [1 << 20])
    return gm
