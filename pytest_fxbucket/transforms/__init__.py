"""Changes of a whole step: what a plan lists under ``[[transform]]``, and what ``capture_step`` takes as ``transforms``."""

from __future__ import annotations

from pytest_fxbucket.transforms.transformation import Traits, transformation

__all__ = ["Traits", "transformation"]
