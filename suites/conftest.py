"""What every suite has: pytester, for runs of pytest within a test, and none of the settings of whoever runs the suites."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _as_on_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CI is set, accepting goldens asks for more."""
    monkeypatch.delenv("CI", raising=False)
