"""A graph module of one's own: nothing that is done to it, in place too, reaches the one that it was copied from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import FakeTensor


def own_copy(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with a graph, constants and graphs within it of its own; nodes have the same names and fake values."""
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    memo: dict[int, Any] = {}
    for name in dict.fromkeys(str(node.target) for node in made.graph.nodes if node.op == "get_attr"):
        *path, last = name.split(".")
        holder: Any = made
        for part in path:
            holder = getattr(holder, part)
        if isinstance(held := getattr(holder, last), (torch.Tensor, fx.GraphModule)):
            setattr(holder, last, _copied(held, memo))
    return made


def _copied(held: Any, memo: dict[int, Any]) -> Any:
    """Constants that share memory do so in the copy; a fake one has nothing to be changed."""
    if isinstance(held, fx.GraphModule):
        return own_copy(held)
    if isinstance(held, FakeTensor):
        return held
    if held.is_leaf:
        return copy.deepcopy(held, memo)
    return held.detach().clone()
