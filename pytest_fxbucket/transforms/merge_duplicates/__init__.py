"""``merge_duplicates``: what the same value is gathered or reduced to twice is gathered or reduced once."""

from __future__ import annotations

from pytest_fxbucket.transforms.merge_duplicates.transform import merge_duplicates

__all__ = ["merge_duplicates"]
