"""From a model and a plan, or a user's own step, to a traced step: frozen graphs with a role for each input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.mesh import Mesh
from pytest_fxbucket.capture.roles import StepGraph
from pytest_fxbucket.capture.traced import TracedStep

if TYPE_CHECKING:
    from pytest_fxbucket.capture.called.step import CapturedStep, capture_step
    from pytest_fxbucket.capture.override.overrides import Override, Subgraph

__all__ = ["CapturedStep", "Mesh", "Override", "StepGraph", "Subgraph", "TracedStep", "capture_step"]


def __getattr__(name: str) -> Any:
    """A step that is called brings torch in: only where it is asked for."""
    if name in ("CapturedStep", "capture_step"):
        from pytest_fxbucket.capture.called import step

        return getattr(step, name)
    if name in ("Override", "Subgraph"):
        from pytest_fxbucket.capture.override import overrides

        return getattr(overrides, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
