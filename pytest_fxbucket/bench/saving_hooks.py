"""Hooks that keep stored runs safe, also those of users' other benchmarks: all go to the same folder."""

from __future__ import annotations

import errno
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_fxbucket.bench.safe_save import never_replaced, replace_whole, save_new
from pytest_fxbucket.compat.pytest_benchmark_storage import drop_empty, json_and_storage, save_with
from pytest_fxbucket.session import fx_session


class Saving:
    """Registered where pytest-benchmark is."""

    def __init__(self) -> None:
        self._unsaved: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Put ours in place of pytest-benchmark's way to save, which is there by now."""

        def replace(path: Path, data: bytes) -> None:
            if lost := _lost(session.config):  # it may have come to be there since
                raise OSError(errno.EEXIST, f"it is {lost}, which is never overwritten")
            replace_whole(path, data)

        save_with(session.config, save_new, replace, self._unsaved.append)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Refuse to overwrite a run before anything is measured; here pytest takes errors of usage."""
        if lost := _lost(session.config):
            file = json_and_storage(session.config)[0]
            raise pytest.UsageError(f"--benchmark-json: {file} is {lost}, which is never overwritten; name another file")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Around pytest-benchmark's saving: what was measured and could not be saved fails the run."""
        drop_empty(session.config)
        result = yield
        if self._unsaved and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def _lost(config: pytest.Config) -> str:
    """What would be lost if --benchmark-json were written; "" if nothing."""
    file, storage = json_and_storage(config)
    return "" if file is None else never_replaced(file, storage, fx_session(config).options.compare)
