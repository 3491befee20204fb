"""Files of stored runs, and the measurements of a plan in one of them, read with care."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import Any

from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.errors import BenchmarkError

_RUN = re.compile(r"([0-9]{4,})_.*\.json")
COMPARED = "fxbucket_compared"
"""Beside a measurement in the extra info: what it was compared with when it was taken, and the outcome."""
NO_MEASURE = ("failed", "error", "untold")
"""Outcomes of runs that later ones are not measured by: slower, never judged, slower perhaps."""
_MEND = "; restore the file, or remove it and measure again"


def run_files(folder: Path) -> list[Path]:
    """Stored runs: `NNNN_*.json` in the storage folder and in those of kinds of machines within it, sorted.

    What has such a name and is no file, such as a link to nothing, is among them: there was a run once.
    """
    files = [*folder.glob("*.json"), *folder.glob("*/*.json")]
    return sorted(file for file in files if number_of(file))


def number_of(file: Path) -> int:
    """The number that pytest-benchmark gave the run; 0 for a file of another name."""
    found = _RUN.fullmatch(file.name)
    return int(found[1]) if found else 0


def records_in(file: Path, of: Record, rootdir: Path) -> list[tuple[Record, bool]]:
    """The measurements of `of`'s plan in a file of pytest-benchmark's, and whether each is no measure for later runs.

    Raises BenchmarkError, naming the file, for damage.
    """
    where = shown(file, rootdir)
    entries = _entries(file, where)
    found = [entry.get("extra_info", {}) if isinstance(entry, dict) else None for entry in entries]
    extra = [info for info in found if isinstance(info, dict)]
    if len(extra) < len(found):
        raise BenchmarkError(f"{where} is damaged, as an entry of it is no table{_MEND}")
    ours = [info for info in extra if "fxbucket" in info and _may_be(info["fxbucket"], of)]
    return [(Record.from_dict(info["fxbucket"], where), _has_failed(info)) for info in ours]


def _entries(file: Path, where: str) -> list[Any]:
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise BenchmarkError(f"{where} cannot be read, as it is no file{_MEND}")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError as error:  # text that is no UTF-8, too
        told = f"{error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BenchmarkError(f"{where} is damaged, as it is no JSON ({told}){_MEND}") from None
    except RecursionError:
        raise BenchmarkError(f"{where} is damaged, as its JSON is nested too deeply{_MEND}") from None
    entries = data.get("benchmarks") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise BenchmarkError(f'{where} is no file of pytest-benchmark, as it has no list "benchmarks"{_MEND}')
    return entries


def _has_failed(info: Mapping[str, Any]) -> bool:
    compared = info.get(COMPARED)
    return isinstance(compared, dict) and compared.get("outcome") in NO_MEASURE


def _may_be(raw: object, of: Record) -> bool:
    """Whether it is the plan's measurement, or may be and is damaged: not its other variants, nor a test's own measurement."""
    if not isinstance(raw, dict):
        return True
    if "variant" in raw or "test" in raw:
        return False
    plan, row = raw.get("plan", of.plan), raw.get("row", of.row)
    is_plan = plan == of.plan or not isinstance(plan, str)
    return is_plan and (row == of.row or not isinstance(row, str | None))


def shown(path: Path, rootdir: Path) -> str:
    """The path as people write it: from `rootdir` if it lies below."""
    return Path(relpath(path, rootdir)).as_posix() if path.is_relative_to(rootdir) else str(path)
