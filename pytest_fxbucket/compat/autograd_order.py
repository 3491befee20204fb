"""Which forward operator a backward operator belongs to: autograd numbers its nodes (torch 2.11 to 2.15)."""

from __future__ import annotations

import torch


def last_node() -> int:
    """Number of the autograd node that this thread made last: in a dispatch mode, of the operator that is called."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]  # not in torch's stubs


def node_at_work() -> int | None:
    """Number of the node whose backward this thread runs; None outside of a backward."""
    node = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if node is not None else None
