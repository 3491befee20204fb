"""Warm processes in one process group, which run functions for the checks; they know nothing of graphs or pytest."""

from __future__ import annotations

from pytest_fxbucket.ranks.backend import device
from pytest_fxbucket.ranks.flight_recorder import mark

__all__ = ["device", "mark"]
