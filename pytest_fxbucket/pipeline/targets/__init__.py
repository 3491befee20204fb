"""Pipeline engines by name: what each takes of a stage, and what runs the stages of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.pipeline.targets.registry import Setup, Target, target_of
    from pytest_fxbucket.pipeline.targets.ties import sum_tied_gradients

__all__ = ["Setup", "Target", "sum_tied_gradients", "target_of"]


def __getattr__(name: str) -> Any:
    """Import on first use: the names bring torch in."""
    if name == "sum_tied_gradients":
        from pytest_fxbucket.pipeline.targets.ties import sum_tied_gradients

        return sum_tied_gradients
    if name in __all__:
        from pytest_fxbucket.pipeline.targets import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
