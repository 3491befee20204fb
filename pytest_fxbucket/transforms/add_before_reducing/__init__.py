"""``add_before_reducing``: RS(a) + RS(b) becomes RS(a + b), which rounds otherwise."""

from __future__ import annotations

from pytest_fxbucket.transforms.add_before_reducing.transform import add_before_reducing

__all__ = ["add_before_reducing"]
