"""Seeing every operator that a process calls (``torch.utils._python_dispatch``, in torch 2.11 to 2.15), and not being seen."""

from __future__ import annotations

import torch
from torch._dispatch.python import enable_python_dispatcher as python_kernels
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "python_kernels", "unseen", "value_of"]

unseen = torch._C._DisableTorchDispatch
"""While entered, no mode sees what is called."""


def value_of(tensor: torch.Tensor) -> float | int | bool:
    """The value of a real tensor of one element, under fake mode too."""
    with unseen():
        return tensor.item()
