"""Seeing every operator that a process calls (``torch.utils._python_dispatch``, in torch 2.11 to 2.14)."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
