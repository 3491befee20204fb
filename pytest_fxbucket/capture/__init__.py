"""From a model and a plan to a traced step: frozen graphs with a role for each input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.capture.roles_by_descriptor import joint_step
from pytest_fxbucket.first_use import on_first_use
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph

if TYPE_CHECKING:
    from pytest_fxbucket.capture.override.overrides import Override, Subgraph
    from pytest_fxbucket.capture.roles_by_placement import placed_step

__all__ = ["Mesh", "Override", "StepGraph", "Subgraph", "TracedStep", "joint_step", "placed_step"]
__getattr__ = on_first_use(
    __name__,
    {"capture.override.overrides": ["Override", "Subgraph"], "capture.roles_by_placement": ["placed_step"]},
)
