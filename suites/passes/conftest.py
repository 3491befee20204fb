"""Programs that are compared before and after the pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from suites.passes import programs


@pytest.fixture
def made() -> programs.Program:
    """On three ranks: two are a special case of many things, and an even number hides a rest. Modes run on two and on four."""
    return programs.Program(3)


@pytest.fixture
def equal(made: programs.Program) -> Callable[..., programs.Passed]:
    """``made``'s graph that returns some nodes, through the pass with each of some settings, and the same on all ranks."""
    return partial(programs.equal, made)
