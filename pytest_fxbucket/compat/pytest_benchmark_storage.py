"""pytest-benchmark's session and storage: where runs are, and how those with measurements of ours are saved.

Run on pytest-benchmark 5.3.1 only: `config._benchmarksession` with `storage`, `save_json`, `benchmarks` and `logger`, and
`FileStorage` with `path` and `get`. At start-up nothing of it is imported: it is loaded, or there is nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.errors import BenchmarkError


def session_of(config: pytest.Config) -> Any | None:
    """pytest-benchmark's own session; None where it is not installed, or switched off by `-p no:benchmark`."""
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
    """The file that `--benchmark-json` names, and the folder with stored runs; None for what there is not."""
    session = session_of(config)
    if session is None:
        return None, None
    storage = Path(session.storage.path) if _is_folder(session.storage) else None
    return Path(session.json) if session.json else None, storage


def drop_empty(config: pytest.Config) -> None:
    """Leave out benchmarks without a single round, as of a test that was interrupted: saving would break, and save nothing."""
    for bench in getattr(session_of(config), "benchmarks", ()):
        if not bench:
            bench.fixture.has_error = True


def has_measured(config: pytest.Config, key: str) -> bool:
    """Whether a benchmark of this session has `key` in its extra info."""
    return any(key in bench.extra_info for bench in getattr(session_of(config), "benchmarks", ()))


def save_with(
    config: pytest.Config,
    save_new: Callable[[Path, str, str, tuple[Path, ...]], Path],
    replace: Callable[[Path, str], None],
    failed: Callable[[str], None],
) -> None:
    """Let the session save runs by `save_new(folder, name, text, beside)` and `--benchmark-json` by `replace(path, text)`.

    The text is what pytest-benchmark would have written. `failed` is told, in a sentence, of a file that could not be written.
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
            replace(Path(session.json), _dumped(output_json))
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

    return str(safe_dumps(output_json, ensure_ascii=True, indent=4))  # type: ignore[no-untyped-call]  # it has no types
