"""Nested containers of tensors (``torch.utils._pytree``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

__all__ = ["keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_unflatten"]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``value``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with each tensor in plain lists, tuples and dicts changed; containers of other classes are as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return {key: map_tensors(change, item) for key, item in value.items()} if type(value) is dict else value
