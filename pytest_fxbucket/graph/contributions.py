"""What a gradient that is reduced was added up from: the backward of each microbatch makes a part of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

_SCALES = ("mul", "div")


def contributions(made: fx.Node, position: Mapping[fx.Node, int], forward: Sequence[int]) -> list[fx.Node]:
    """Nodes that make the parts which ``made`` adds up, if there is forward compute between them; else ``made`` alone.

    ``forward`` holds the positions of forward's nodes, ascending: parts of one backward, as of a layer that is used twice,
    are no microbatches, and their sum is one gradient.
    """
    parts: list[fx.Node] = []
    queue = [made]
    for node in queue:
        sources = _added(node)
        if sources:
            queue.extend(source for source in sources if source not in queue)
        else:
            parts.append(node)
    places = sorted(position[node] for node in parts)
    several = len(parts) > 1 and bisect_right(forward, places[0]) < bisect_right(forward, places[-1])
    return parts if several else [made]


def _added(node: fx.Node) -> list[fx.Node]:
    """What ``node`` adds, scales by a number, moves or casts; nothing if it does none of these."""
    name = operator_name(node).removeprefix("aten::").rstrip("_") if node.op == "call_function" else ""
    sources = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    adds = name == "add" and len(sources) == 2 and len({one.meta["val"].shape for one in sources}) == 1
    scales = name in _SCALES and len(sources) == 1
    return sources if adds or scales or (len(sources) == 1 and node.op == "call_function" and moves_data(node)) else []
