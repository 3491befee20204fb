"""A matrix that arrives is seen as if its columns lay one behind the other, not its rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.launches import flights
from pytest_fxbucket.mutate.moving import carries
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site

aten = torch.ops.aten


def sites(seen: SeenGraph) -> Iterator[Site]:
    """The last view of each member behind a wait, where it gives a matrix of several rows and columns."""
    for flight in flights(seen):
        for node in flight.arrived:
            shape = [size for size in node.meta["val"].shape if size != 1] if operator_name(node) == "aten::view" else []
            if len(shape) == 2 and len(node.meta["val"].shape) == 2 and any(not carries(user) for user in _read(node)):
                yield Site(node.name, "takes columns for rows", partial(_turn, node.name))


def _read(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Who reads ``node``, turned around too."""
    return [reader for user in node.users for reader in (user.users if operator_name(user) == "aten::t" else [user])]


def _turn(name: str, broken: BrokenGraph) -> None:
    view = broken[name]
    rows, columns = view.meta["val"].shape
    other = broken.before(view, aten.view.default, view.args[0], [columns, rows])
    turned = broken.before(view, aten.t.default, other)
    broken.bypass(view, broken.before(view, aten.clone.default, turned, memory_format=torch.contiguous_format))
