"""Which results must lie in a storage of their own, because somebody asks where they lie in it."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.ops import is_view, operator_name, returns_written

if TYPE_CHECKING:
    from torch import fx

_READERS = frozenset(
    {
        *(f"aten::as_strided{form}" for form in ("", "_", "_copy", "_scatter")),
        *(f"aten::{name}" for name in ("set_", "resize_", "resize_as_", "storage_offset", "sym_storage_offset")),
        "aten::view_as_complex",
        "inductor::resize_storage_bytes_",
    }
)
"""Operators that count from the storage's beginning, change its size, or ask for an aligned offset."""


def need_own_storage(node: fx.Node) -> bool:
    """Whether ``node``'s result, or a view of it, is read by an operator that its place in a larger storage would show to."""
    queue = [node]
    found = {node}
    for current in queue:
        for user in current.users:
            if _asks(user):
                return True
            if _shares(user) and user not in found:
                found.add(user)
                queue.append(user)
    return False


def _asks(node: fx.Node) -> bool:
    return operator_name(node) in _READERS or node.target is torch.ops.aten.view.dtype


def _shares(node: fx.Node) -> bool:
    """Whether ``node``'s result may lie in the storage of one of its inputs."""
    return node.target is getitem or is_view(node) or returns_written(node)
