"""Programs that are compared before and after the pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from suites.passes import programs


@pytest.fixture(params=[3, 4], ids="{} ranks".format)
def world(request: pytest.FixtureRequest) -> int:
    """How many ranks there are. Two are a special case of many things; graphs of ``partings`` run on two."""
    return int(request.param)


@pytest.fixture
def made(world: int) -> programs.Program:
    return programs.Program(world)


@pytest.fixture
def equal(made: programs.Program) -> Callable[..., programs.Passed]:
    """``made``'s graph that returns some nodes, through the pass with each of some settings, and the same on all ranks."""
    return partial(programs.equal, made)
