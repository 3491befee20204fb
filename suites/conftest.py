"""What every suite has: pytester, for runs of pytest within a test, and none of the settings of whoever runs the suites."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _as_on_a_desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI is set, accepting goldens asks for more; and each run within a run would import hypothesis anew, in 2 s."""
    monkeypatch.delenv("CI", raising=False)
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester")  # which forgets what is set before it is made
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
