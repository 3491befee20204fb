"""What goes to experts and back by all-to-all is not put in order, or in the reversed one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import launch_kind, tensors_sent, waits_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import leave_out, put_behind, tensor

if TYPE_CHECKING:
    from torch import fx

_PERMUTES = ("aten::transpose", "aten::permute", "aten::t", "aten::flip", "aten::roll")


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Waits for all-to-alls, and what permutes their tokens without a change of shape, before the launch or behind the wait."""
    for launch in seen.graph.nodes:
        if launch_kind(launch) != "all_to_all":
            continue
        before = reached(tensors_sent(launch), lambda node: filter(moves_data, node.all_input_nodes))
        behind = reached(waits_of(launch), lambda node: filter(_is_moved, node.users))
        for node in (*before, *behind):
            if operator_name(node) in _PERMUTES and _keeps_shape(node):
                yield Site(node.name, f"is left out, beside {launch.name}", partial(leave_out, node.name))
        for wait in waits_of(launch):
            # A single row is the same when it is reversed.
            if (value := tensor(wait)) is not None and value.dim() and value.shape[0] != 1:
                yield Site(wait.name, "is read in reversed order", partial(_reverse, wait.name))


def _is_moved(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node)


def _keeps_shape(node: fx.Node) -> bool:
    made, source = tensor(node), tensor(node.all_input_nodes[0])
    return made is not None and source is not None and made.shape == source.shape


def _reverse(name: str, broken: BrokenGraph) -> None:
    wait = broken[name]
    put_behind(wait, broken.behind(wait, torch.ops.aten.flip.default, wait, [0]))
