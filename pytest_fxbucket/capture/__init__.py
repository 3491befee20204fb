"""From a model and a plan to a traced step: frozen graphs with a role for each input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.capture.roles_by_descriptor import joint_step
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph

if TYPE_CHECKING:
    from pytest_fxbucket.capture.override.overrides import Override, Subgraph
    from pytest_fxbucket.capture.roles_by_placement import placed_step

__all__ = ["Mesh", "Override", "StepGraph", "Subgraph", "TracedStep", "joint_step", "placed_step"]


def __getattr__(name: str) -> Any:
    """Import names that need torch when they are first asked for."""
    if name in ("Override", "Subgraph"):
        from pytest_fxbucket.capture.override import overrides

        return getattr(overrides, name)
    if name == "placed_step":
        from pytest_fxbucket.capture import roles_by_placement

        return roles_by_placement.placed_step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
