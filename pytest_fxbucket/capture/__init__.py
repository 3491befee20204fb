"""From a model and a plan to a traced step: frozen graphs with a role for each input and output."""

from __future__ import annotations

from pytest_fxbucket.capture.mesh import Mesh
from pytest_fxbucket.capture.roles import StepGraph
from pytest_fxbucket.capture.traced import TracedStep

__all__ = ["Mesh", "StepGraph", "TracedStep"]
