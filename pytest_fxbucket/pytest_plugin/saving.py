"""Stores runs with our measurements in pytest-benchmark's storage: written whole, each under a number of its own.

Uses private parts of pytest-benchmark, tested with 5.3.1 only: ``config._benchmarksession`` with ``storage``, ``save_json``,
``benchmarks`` and ``logger``, and ``FileStorage`` with ``path`` and ``get``. Nothing of it is imported at start-up: it
is loaded as a plugin by then, or there is nothing to do.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.files import locked, settle, sweep, write_whole
from pytest_fxbucket.pytest_plugin.session import fx_session


def session_of(config: pytest.Config) -> Any | None:
    """pytest-benchmark's own session; None where it is not installed, or switched off by ``-p no:benchmark``."""
    return getattr(config, "_benchmarksession", None)


def storage_folder(config: pytest.Config) -> Path:
    """The folder with stored runs of all kinds of machines. Raises BenchmarkError where they are stored elsewhere."""
    session = session_of(config)
    if session is None:
        raise BenchmarkError(
            "step time is stored by pytest-benchmark, which is not there; install it, or leave out -p no:benchmark"
        )
    if not _is_folder(session.storage):
        raise BenchmarkError(
            f"stored runs in {type(session.storage).__name__} cannot be read; --benchmark-storage must be a folder, such as "
            "file://./.benchmarks"
        )
    return Path(session.storage.path)


def set_timer(benchmark: Any, timer: Callable[[], float]) -> None:
    """Let the fixture read that clock, whatever a marker or an option says."""
    benchmark._timer = timer


def count_as_used(benchmark: Any) -> None:
    """Keep the fixture from warning that nobody used it, where there was nothing to use it for."""
    benchmark._mode = benchmark._mode or "no samples"


def json_and_storage(config: pytest.Config) -> tuple[Path | None, Path | None]:
    """The file that ``--benchmark-json`` names, and the folder with stored runs; each may be None."""
    session = session_of(config)
    if session is None:
        return None, None
    storage = Path(session.storage.path) if _is_folder(session.storage) else None
    return Path(session.json) if session.json else None, storage


def _save_whole(config: pytest.Config, failed: Callable[[str], None]) -> None:
    """Let the session save runs by :func:`save_new`, and ``--benchmark-json`` by :func:`replace_whole`.

    The text is what pytest-benchmark would have written. ``failed`` is told, in a sentence, of a file that could not be
    written.
    """
    session = session_of(config)
    assert session is not None, "it has benchmarks"
    storage, logger = session.storage, session.logger

    def unsaved(what: object, error: BaseException) -> None:
        why = (isinstance(error, OSError) and error.strerror) or "interrupted"
        sentence = f"Benchmark data is not saved: {what} could not be written ({why})"
        logger.error(sentence)
        failed(sentence)

    def save(output_json: object, save: str) -> None:
        # Runs of this kind of machine have a folder of their own, which the storage tells only with a file in it.
        folder = Path(storage.get("_")).parent
        try:
            file = save_new(folder, save, _dumped(output_json), (Path(storage.path),))
        except OSError as error:
            return unsaved(f"a file in {folder}", error)
        except KeyboardInterrupt as error:
            unsaved(f"a file in {folder}", error)
            raise
        logger.info(f"Saved benchmark data in: {file}")

    def save_json(output_json: object) -> None:
        try:
            if lost := _lost(config):  # it may have come to be there since
                raise OSError(errno.EEXIST, f"it is {lost}, which is never overwritten")
            replace_whole(Path(session.json), _dumped(output_json))
        except OSError as error:
            return unsaved(session.json, error)
        logger.info(f"Wrote benchmark data in: {session.json}", purple=True)

    session.save_json = save_json
    if _is_folder(storage):
        storage.save = save


def _is_folder(storage: object) -> bool:
    module = sys.modules.get("pytest_benchmark.storage.file")
    return module is not None and isinstance(storage, module.FileStorage)


def _dumped(output_json: object) -> str:
    from pytest_benchmark.utils import safe_dumps

    return str(safe_dumps(output_json, ensure_ascii=True, indent=4))


# Stored runs with our measurements are written whole and over no other, even if runs end at once or are killed.
#
# pytest-benchmark takes the next number from a listing and then writes into the file of that name: two runs may take the same
# one, and one that is killed leaves half a file. What it saves of a session without a measurement of ours is left to it.


KEY = "fxbucket"
"""The key of extra info under which our measurements lie."""


class BenchmarkSaving:
    """Hooks around pytest-benchmark's saving; registered only if pytest-benchmark is."""

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
        benchmarks = getattr(session_of(session.config), "benchmarks", ())
        if any(KEY in bench.extra_info for bench in benchmarks):
            for bench in benchmarks:
                if not bench:  # no round, as of a test that was interrupted: saving would raise on it and save nothing
                    bench.fixture.has_error = True
            _save_whole(session.config, unsaved.append)
        result = yield
        if unsaved and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def save_new(folder: Path, name: str, text: str, beside: Iterable[Path] = ()) -> Path:
    """Write ``text`` as ``NNNN_<name>.json`` in ``folder``, made if need be; NNNN is one more than any there and in ``beside``.

    Returns its path. Raises OSError, and then nothing is left; what was there before is never touched.
    """
    from pytest_fxbucket.bench.store import number_of

    folder.mkdir(parents=True, exist_ok=True)
    # The number is chosen under a lock, so that two runs which end at once do not take the same one.
    with locked(folder):
        sweep(folder.iterdir())
        number = 1 + max((number_of(file) for each in (folder, *beside) for file in each.glob("*_*.json")), default=0)
        target = folder / f"{number:04}_{name}.json"
        write_whole(target, text)
        settle(folder)
    return target


def replace_whole(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` once that is whole and on disk. Raises OSError, and then the old file stays.

    A link is followed. A device or a pipe cannot be replaced: the text is written into it.
    """
    places = (os.path.abspath(path), os.path.realpath(path))  # /dev/stdout may be a file that is open
    if (path.exists() and not path.is_file()) or any(place.startswith(("/dev/", "/proc/")) for place in places):
        path.write_text(text, encoding="utf-8")
        return
    write_whole(Path(os.path.realpath(path)), text)
    settle(Path(os.path.realpath(path)).parent)


def never_replaced(path: Path, storage: Path | None, compared: str | None) -> str:
    """What would be lost if ``path`` were replaced: our run below ``storage``, or the file ``compared``; "" if nothing."""
    from pytest_fxbucket.bench.store import number_of

    target = Path(os.path.realpath(path))
    if compared is not None and os.path.isabs(compared) and os.path.realpath(compared) == str(target):
        return "the run to compare with"
    is_run = storage is not None and number_of(target) and target.is_relative_to(os.path.realpath(storage)) and target.is_file()
    return "a stored run" if is_run and f'"{KEY}"'.encode() in target.read_bytes() else ""


def _lost(config: pytest.Config) -> str:
    """What would be lost if --benchmark-json were written; "" if nothing."""
    file, storage = json_and_storage(config)
    return "" if file is None else never_replaced(file, storage, fx_session(config).options.compare)
