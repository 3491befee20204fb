"""Passes that change more than buckets, and leave all bits as they were: each small, real, and of any joint graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.walks import reached
from suites.checks.bucketed_llama import like

Plans = Sequence[str | list[str]]
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CHEAP = {aten.tanh.default, aten.silu.default, aten.rsqrt.default}
"""What selective recomputation computes again instead of keeping it."""


def recomputed(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """What is cheap is computed once more, right before backward reads it, so that only what it is made of is kept."""
    for node, reader in _saved(gm, CHEAP):
        with gm.graph.inserting_before(reader):
            again = like(node, node.target, *node.args, **node.kwargs)
        _read_from(reader, node, again)
    return gm


def offloaded(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Activations that backward reads go to the CPU once they are there, and come back right before they are read."""
    for node, reader in _saved(gm, CHEAP):
        with gm.graph.inserting_after(node):
            kept = like(node, aten._to_copy.default, node, device=torch.device("cpu"))
        with gm.graph.inserting_before(reader):
            back = like(node, aten._to_copy.default, kept, device=node.meta["val"].device)
        for user in set(node.users) - _forward(gm) - {kept}:
            user.replace_input_with(node, back)
    return gm


def chunked(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Products of forward are made for one half of the rows and for the other, and joined again."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        if node not in _forward(gm):
            continue
        rows, weight = node.args
        half = rows.meta["val"].shape[0] // 2
        with gm.graph.inserting_before(node):
            products = [like(node, node.target, part, weight) for part in _halves(rows)]
            for product, value in zip(products, (node.meta["val"][:half], node.meta["val"][half:]), strict=True):
                product.meta["val"] = value
            joined = like(node, aten.cat.default, products)
        node.replace_all_uses_with(joined)
        gm.graph.erase_node(node)
    return gm


def parted_reductions(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Sums of activations over ranks are launched in two parts, the first as soon as it is there."""
    for launch in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        sent = launch.args[0]
        (wait,) = launch.users
        with gm.graph.inserting_before(launch):
            launches = [like(part, launch.target, part, *launch.args[1:]) for part in _halves(sent)]
        with gm.graph.inserting_before(wait):
            joined = like(wait, aten.cat.default, [like(one, wait.target, one) for one in launches])
        wait.replace_all_uses_with(joined)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(launch)
    return gm


def _halves(rows: fx.Node) -> list[fx.Node]:
    """Both halves of its rows, at the graph's insertion point."""
    value = rows.meta["val"]
    half = value.shape[0] // 2
    parts = []
    for begin, end in ((0, half), (half, value.shape[0])):
        parts.append(like(rows, aten.slice.Tensor, rows, 0, begin, end))
        parts[-1].meta["val"] = value[begin:end]
    return parts


def _forward(gm: fx.GraphModule) -> set[fx.Node]:
    """What the loss, the first output, is made of."""
    (returned,) = gm.graph.output_node().args
    return set(reached([returned[0]], lambda node: node.all_input_nodes))


def _saved(gm: fx.GraphModule, targets: set[Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each activation of ``targets`` that backward reads, and its first reader there."""
    forward = _forward(gm)
    for node in list(gm.graph.nodes):
        if node.target in targets and node in forward:
            readers = [user for user in node.users if user not in forward]
            if readers:
                place = {one: at for at, one in enumerate(gm.graph.nodes)}
                yield node, min(readers, key=place.__getitem__)


def _read_from(first: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Let ``first`` and all readers of ``old`` behind it read ``new``."""
    place = {one: at for at, one in enumerate(first.graph.nodes)}
    for user in list(old.users):
        if place[user] >= place[first] and user is not new:
            user.replace_input_with(old, new)


# What breaks a promise, or keeps all, beside such passes.


def other_operation(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """A reduction of parameters adds where the plan has it average."""
    launch = gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)[1]
    launch.args = (launch.args[0], "sum", *launch.args[2:])
    return gm


def scaled_gradient(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """The last gradient that is sent is made by a node that was not there."""
    launch = gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)[-1]
    made = next(one for one in reached([launch], lambda node: node.all_input_nodes) if computes(one))
    with made.graph.inserting_after(made):
        scaled = like(made, aten.mul.Tensor, made, 1.0)
    made.replace_all_uses_with(scaled, lambda user: user is not scaled)
    return gm


def named_anew(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """As a pass does that builds the graph again."""
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate(gm.graph.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), of.__getitem__)
        name = node.name if node.op in ("placeholder", "output") else f"n{number}"
        of[node] = made.create_node(node.op, node.target, args, kwargs, name, node.type)
        of[node].meta = dict(node.meta)
    return fx.GraphModule(gm, made)
