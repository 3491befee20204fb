"""Warm processes in one process group, which run functions for the checks; they know nothing of graphs or pytest."""

from __future__ import annotations

from pytest_fxbucket.ranks.flight_recorder import mark
from pytest_fxbucket.ranks.machine import device

__all__ = ["device", "mark"]
