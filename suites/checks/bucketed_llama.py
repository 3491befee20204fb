"""What tests break in a bucketed Llama of two layers: its launches, packs and cuts found, nodes made, moved and exchanged."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from torch import fx

from pytest_fxbucket.graph import collectives

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
WK, WV = 1, 2
"""Members of a layer's bucket that have the same shape."""


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    """Forward: tok_embeddings, layers.0, layers.1, norm+output; backward: layers.1, layers.0."""
    return calls(gm, c10d.all_gather_into_tensor.default)


def reductions(gm: fx.GraphModule) -> list[fx.Node]:
    """norm+output, layers.1, layers.0, tok_embeddings."""
    return calls(gm, c10d.reduce_scatter_tensor.default)


def packs(gm: fx.GraphModule) -> list[fx.Node]:
    """Of all-gathers: layers.0, layers.1, norm+output, and again in backward."""
    packs = [gather.all_input_nodes[0] for gather in gathers(gm)]
    return [pack for pack in packs if len(pack.all_input_nodes) > 1]


def columns(gm: fx.GraphModule) -> list[fx.Node]:
    """What cuts the members out of the gathers of :func:`packs`."""
    return [cut for cut in calls(gm, aten.split_with_sizes.default) if len(cut.args) == 3 and len(cut.users) > 1]


def cuts(gm: fx.GraphModule) -> list[fx.Node]:
    """What cuts the members out of the reductions."""
    return [cut for cut in calls(gm, aten.split_with_sizes.default) if len(cut.args) == 2]


def launch_behind(place: fx.Node, launch: fx.Node) -> None:
    """Move ``launch`` and its pack to where ``place`` stands."""
    pack = launch.all_input_nodes[0]
    flat = [node for node in pack.all_input_nodes if node.target is aten.reshape.default]
    for node in (launch, pack, *flat):
        place.append(node)


def wait_of(launch: fx.Node) -> fx.Node:
    return next(user for user in launch.users if collectives.is_wait(user))


def swap_members(pack: fx.Node) -> None:
    members, *rest = pack.args
    assert isinstance(members, (list, tuple))
    swapped = list(members)
    swapped[WK], swapped[WV] = swapped[WV], swapped[WK]
    pack.args = (swapped, *rest)


def swap_pieces(split: fx.Node) -> None:
    for user in list(split.users):
        assert user.target is getitem
        user.args = (split, {WK: WV, WV: WK}.get(user.args[1], user.args[1]))


def like(model: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the graph's insertion point that says of itself what ``model`` says."""
    node = model.graph.call_function(target, args, kwargs)
    node.meta = dict(model.meta)
    return node


def replace_input(node: fx.Node, old: fx.Node, make: Callable[[fx.Node], fx.Node]) -> None:
    with node.graph.inserting_before(node):
        new = make(old)
    node.replace_input_with(old, new)


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1
