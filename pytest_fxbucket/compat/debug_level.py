"""TORCH_DISTRIBUTED_DEBUG: at DETAIL torch wraps each new process group, and puts a gloo group of its own beside it."""

from __future__ import annotations

from typing import Any


def leave_groups_unwrapped() -> Any:
    """Have new process groups as they are, at whatever level; returns the level, for `put_back`."""
    from torch._C import _distributed_c10d as c10d

    level = c10d.get_debug_level()
    if level == c10d.DebugLevel.DETAIL:
        c10d.set_debug_level(c10d.DebugLevel.INFO)
    return level


def put_back(level: Any) -> None:
    """Let new process groups be as torch was told."""
    from torch._C import _distributed_c10d as c10d

    c10d.set_debug_level(level)
