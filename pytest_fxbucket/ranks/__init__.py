"""Warm processes in one process group, which run functions for the checks; they know nothing of graphs or pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.flight_recorder import mark
    from pytest_fxbucket.ranks.machine import device

__all__ = ["device", "mark"]
# Only ranks use them, and each pytest would load what they need.
__getattr__ = on_first_use(__name__, {"ranks.flight_recorder": ["mark"], "ranks.machine": ["device"]})
