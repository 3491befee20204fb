"""The captured train step: a user's own step, traced once and then called like the function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.step import CapturedStep, capture_step

__all__ = ["CapturedStep", "capture_step"]
__getattr__ = on_first_use(__name__, {"train_step.step": ["CapturedStep", "capture_step"]})
