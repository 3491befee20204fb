"""What checks of one plan share."""

from __future__ import annotations

import pytest

from pytest_fxbucket.capture.last_step import LastStep


@pytest.fixture(scope="module")
def last_step() -> LastStep:
    """The captured step, which the tests of a file take turns to check."""
    return LastStep()
