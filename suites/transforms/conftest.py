"""A program to be written by hand, and its first input."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.fuzz.program import Program


@pytest.fixture
def made() -> Program:
    """On two ranks."""
    return Program(2)


@pytest.fixture
def x(made: Program) -> fx.Node:
    """A shard, (2, 3) in float32."""
    return made.given("x", 2, 3)
