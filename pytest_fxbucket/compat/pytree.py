"""Nested containers of tensors (``torch.utils._pytree``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

__all__ = ["keystr", "tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_unflatten"]
