"""The functional collectives (``torch.distributed._functional_collectives``, in torch 2.11 to 2.15)."""

from __future__ import annotations

from typing import Any


def c10d_functional() -> Any:
    """``torch.ops._c10d_functional``, with its operators registered."""
    import torch
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional
