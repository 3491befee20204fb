"""From a model and a plan to a traced step: frozen graphs with a role for each input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.traced import TracedStep
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph

if TYPE_CHECKING:
    from pytest_fxbucket.capture.override.overrides import Override, Subgraph

__all__ = ["Mesh", "Override", "StepGraph", "Subgraph", "TracedStep"]


def __getattr__(name: str) -> Any:
    """Overrides bring torch in: only where they are asked for."""
    if name in ("Override", "Subgraph"):
        from pytest_fxbucket.capture.override import overrides

        return getattr(overrides, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
