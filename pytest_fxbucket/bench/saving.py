"""Stored runs with our measurements are written whole and over no other, even if runs end at once or are killed.

pytest-benchmark takes the next number from a listing and then writes into the file of that name: two runs may take the same
one, and one that is killed leaves half a file. What it saves of a session without a measurement of ours is left to it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from pytest_fxbucket.bench.store import number_of
from pytest_fxbucket.compat.pytest_benchmark_storage import drop_empty, has_measured, json_and_storage, save_with
from pytest_fxbucket.golden.disk import locked, settle, sweep, write_whole
from pytest_fxbucket.session import fx_session

KEY = "fxbucket"
"""Of the extra info: what is ours lies there."""


class Saving:
    """Registered where pytest-benchmark is."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Refuse to overwrite a run before anything is measured; here pytest takes errors of usage."""
        if lost := _lost(session.config):
            file = json_and_storage(session.config)[0]
            raise pytest.UsageError(f"--benchmark-json: {file} is {lost}, which is never overwritten; name another file")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Around pytest-benchmark's saving: what was measured and could not be saved fails the run."""
        unsaved: list[str] = []

        def replace(path: Path, text: str) -> None:
            if lost := _lost(session.config):  # it may have come to be there since
                raise OSError(errno.EEXIST, f"it is {lost}, which is never overwritten")
            replace_whole(path, text)

        if has_measured(session.config, KEY):
            drop_empty(session.config)
            save_with(session.config, save_new, replace, unsaved.append)
        result = yield
        if unsaved and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def save_new(folder: Path, name: str, text: str, beside: Iterable[Path] = ()) -> Path:
    """Write `text` as `NNNN_<name>.json` in `folder`, made if need be, NNNN being one more than any there and in `beside`.

    Returns its path. Raises OSError, and then nothing is left; what was there before is never touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        sweep(folder.iterdir())
        number = 1 + max((number_of(file) for each in (folder, *beside) for file in each.glob("*_*.json")), default=0)
        target = folder / f"{number:04}_{name}.json"
        write_whole(target, text)
        settle(folder)
    return target


def replace_whole(path: Path, text: str) -> None:
    """Write `text` to `path`: until it is whole and on disk, what was there stays. Raises OSError, and then it is there too.

    A link is followed. What is no file of a disk, such as a device or a pipe, cannot be replaced: the text goes into it.
    """
    places = (os.path.abspath(path), os.path.realpath(path))  # /dev/stdout may be a file that is open
    if (path.exists() and not path.is_file()) or any(place.startswith(("/dev/", "/proc/")) for place in places):
        path.write_text(text, encoding="utf-8")
        return
    write_whole(Path(os.path.realpath(path)), text)
    settle(Path(os.path.realpath(path)).parent)


def never_replaced(path: Path, storage: Path | None, compared: str | None) -> str:
    """What of ours would be lost with `path`: a run below `storage`, or the file `compared`; "" if it may be replaced."""
    target = Path(os.path.realpath(path))
    if compared is not None and os.path.isabs(compared) and os.path.realpath(compared) == str(target):
        return "the run to compare with"
    is_run = storage is not None and number_of(target) and target.is_relative_to(os.path.realpath(storage)) and target.is_file()
    return "a stored run" if is_run and f'"{KEY}"'.encode() in target.read_bytes() else ""


def _lost(config: pytest.Config) -> str:
    """What would be lost if --benchmark-json were written; "" if nothing."""
    file, storage = json_and_storage(config)
    return "" if file is None else never_replaced(file, storage, fx_session(config).options.compare)
