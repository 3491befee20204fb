"""Tensors on a GPU for a group that works on the CPU: copied there to be sent, and what arrives copied back.

Containers may be nested lists; they come back as lists of the same nesting. A tensor on the CPU is its own stand-in.
"""

from __future__ import annotations

from typing import Any

import torch


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether `tensor` needs a stand-in."""
    return tensor.device.type != "cpu"


def on_cpu(tensors: Any) -> Any:
    """Stand-ins with the tensors' values."""
    if isinstance(tensors, torch.Tensor):
        return tensors.detach().cpu() if is_staged(tensors) else tensors
    return [on_cpu(tensor) for tensor in tensors]


def room_for(tensors: Any) -> Any:
    """Stand-ins of the tensors' shapes and dtypes, to be filled."""
    if isinstance(tensors, torch.Tensor):
        return torch.empty(tensors.shape, dtype=tensors.dtype, device="cpu") if is_staged(tensors) else tensors
    return [room_for(tensor) for tensor in tensors]


def bring_back(tensors: Any, stand_ins: Any) -> None:
    """Copy stand-ins into the tensors that they stand for."""
    if not isinstance(tensors, torch.Tensor):
        for pair in zip(tensors, stand_ins, strict=True):
            bring_back(*pair)
    elif stand_ins is not tensors:
        tensors.detach().copy_(stand_ins)
