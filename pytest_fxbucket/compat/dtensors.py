"""DTensors by what this rank holds of them (``torch.distributed.tensor``); in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``: the tensor inside a DTensor itself; any other as it is."""
    found: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]  # a DTensor's
    return found


def spec_of(tensor: torch.Tensor) -> Any:
    """Mesh, placements, sizes and strides of a DTensor; None for any other."""
    return tensor._spec if is_dtensor(tensor) else None  # type: ignore[attr-defined]  # a DTensor's


def of_local(local: torch.Tensor, spec: Any, *, requires_grad: bool = False) -> torch.Tensor:
    """The DTensor of ``spec`` with ``local`` as its local tensor; ``local`` itself if ``spec`` is None."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=requires_grad)


def placed_as(tensor: torch.Tensor, spec: Any) -> torch.Tensor:
    """What this rank holds of ``tensor``, a DTensor on the mesh of ``spec``, placed as ``spec`` says; any other as it is."""
    if not is_dtensor(tensor):
        return tensor
    return local_of(tensor.redistribute(placements=spec.placements))  # type: ignore[attr-defined]  # a DTensor's
