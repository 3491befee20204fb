"""Moves the reduction and the update of entries into the next iteration: set-up, steady and clean-up graphs."""

from __future__ import annotations

from pytest_fxbucket.transforms.next_iteration.transform import next_iteration

__all__ = ["next_iteration"]
