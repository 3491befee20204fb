"""How FSDP2 goes through the inputs of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.utils import _apply_to_tensors


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], given: Any) -> Any:
    """``given`` with each tensor in its tuples, lists, dicts, sets and dataclasses changed."""
    return _apply_to_tensors(change, given)
