"""Whether an operator can run on a device (``torch._C`` of torch 2.11 to 2.15; a CPU build knows it for CUDA in part only)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_kernel(operator: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether ``operator`` has a kernel for ``cpu``, ``cuda`` or ``meta``, be it one for all devices."""
    import torch

    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}[device_type]
    name = operator._schema.name + (f".{operator._schema.overload_name}" if operator._schema.overload_name else "")
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key))
