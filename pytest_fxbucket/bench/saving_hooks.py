"""Hooks that keep stored runs safe, also those of users' other benchmarks: all go to the same folder."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_fxbucket.bench.safe_save import replace_whole, save_new
from pytest_fxbucket.compat.pytest_benchmark_storage import drop_empty, save_with


class Saving:
    """Registered where pytest-benchmark is."""

    def __init__(self) -> None:
        self._unsaved: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Put ours in place of pytest-benchmark's way to save, which is there by now."""
        save_with(session.config, save_new, replace_whole, self._unsaved.append)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Around pytest-benchmark's saving: what was measured and could not be saved fails the run."""
        drop_empty(session.config)
        result = yield
        if self._unsaved and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result
