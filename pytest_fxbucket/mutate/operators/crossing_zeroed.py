"""What goes to another graph is zero."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import give_nodes, results, tensor


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every output that crosses."""
    for place, node, value in results(seen, "crossing"):
        if tensor(node) is not None:
            yield Site(node.name, f"is zero where it is sent as {value.fqn}", partial(_zero, place, node.name))


def _zero(place: int, name: str, broken: BrokenGraph) -> None:
    zero = broken.before(broken.graph.output_node(), torch.ops.aten.zeros_like.default, broken[name])
    give_nodes({place: zero}, broken)
