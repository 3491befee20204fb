"""The captured train step: a user's own step, traced once and then called like the function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.step import CapturedStep, capture_step

__all__ = ["CapturedStep", "capture_step"]


def __getattr__(name: str) -> Any:
    """Import :mod:`pytest_fxbucket.train_step.step`, and torch with it, only when one of its names is used."""
    if name in __all__:
        from pytest_fxbucket.train_step import step

        return getattr(step, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
