"""Warm processes in one process group, which run functions for the checks; they know nothing of graphs or pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.flight_recorder import mark
    from pytest_fxbucket.ranks.machine import device

__all__ = ["device", "mark"]


def __getattr__(name: str) -> Any:
    """Load ``mark`` and ``device`` when asked for: only ranks use them, and each pytest would load what they need."""
    if name == "mark":
        from pytest_fxbucket.ranks.flight_recorder import mark

        return mark
    if name == "device":
        from pytest_fxbucket.ranks.machine import device

        return device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
