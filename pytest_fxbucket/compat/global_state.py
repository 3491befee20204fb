"""What torch does to every module and every new tensor, by its private tables (torch 2.11 to 2.15; run on 2.13 only)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module

_TABLES = (
    "_global_buffer_registration_hooks",
    "_global_module_registration_hooks",
    "_global_parameter_registration_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_FLAG = "_global_is_full_backward_hook"


def module_hooks() -> dict[str, Any]:
    """All of them, by table."""
    found: dict[str, Any] = {name: dict(getattr(module, name)) for name in _TABLES if hasattr(module, name)}
    return {**found, _FLAG: getattr(module, _FLAG, None)}


def set_module_hooks(hooks: dict[str, Any]) -> None:
    """Have those that :func:`module_hooks` gave, and no others."""
    for name, entries in hooks.items():
        if name == _FLAG:
            setattr(module, name, entries)
            continue
        table = getattr(module, name)
        table.clear()
        table.update(entries)


def default_device() -> torch.device | None:
    """The device that torch.set_default_device has set in this thread; None where it was not called."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device if context is not None else None
