"""Which plans ``fxbucket compare`` is about: those that are named, or all below a folder that have the benchmark on."""

from __future__ import annotations

import configparser
import glob
import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.cli.common import typed
from pytest_fxbucket.errors import FxbucketError, UsageError
from pytest_fxbucket.explain.find import parts
from pytest_fxbucket.files import plans_below
from pytest_fxbucket.plan.load import load_plans

_OWN = ("pytest.toml", ".pytest.toml")
_INI = {"pytest.ini": "pytest", ".pytest.ini": "pytest", "tox.ini": "pytest", "setup.cfg": "tool:pytest"}


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan by file and row, which need not be there now."""

    file: Path
    row: str | None
    is_found: bool = False
    """Whether it was found in a folder or by a glob, and not named itself."""

    @property
    def typed(self) -> str:
        """The plan as it is typed."""
        return typed(self.file, self.row)


def named_plans(asked: Sequence[str]) -> list[NamedPlan]:
    """The plans that ``--plan`` names, each a file, perhaps with a row, or a folder; without any those of ini fxbucket_plans.

    Raises UsageError if that is none, FxbucketError for a file below a folder that is no plan.
    """
    if not asked:
        asked, where = _of_ini(Path.cwd())
    else:
        where = "--plan"
    found = dict.fromkeys(plan for text in asked for plan in _expanded(text))
    if not found:
        raise UsageError(
            f"{where}: no plan there has [checks] benchmark = true; turn it on, or name a plan: --plan PATH[::ROW]"
            if asked
            else "no plan is named, and there is no ini fxbucket_plans; name one: --plan PATH[::ROW], or a folder"
        )
    return list(found)


def _expanded(text: str) -> Iterator[NamedPlan]:
    path = Path(text)
    # FILE[ROW] and FILE::ROW name a row of a plan, though brackets could be a glob's.
    if path.is_dir():
        files = plans_below(path)
    elif glob.has_magic(text) and not path.exists() and "::" not in text and not text.endswith("]"):
        files = [Path(name) for name in sorted(glob.glob(text, recursive=True)) if name.endswith(".toml")]
    else:
        yield NamedPlan(*parts(text))
        return
    for file in files:
        for plan in load_plans(file):
            if plan.checks.benchmark:
                yield NamedPlan(file, plan.matrix_id, is_found=True)


def _of_ini(start: Path) -> tuple[list[str], str]:
    """Entries of ini fxbucket_plans in the nearest ini file of pytest above ``start``, as paths from there; and its name."""
    for folder in (start, *start.parents):
        # The order in which pytest looks.
        for name in (*_OWN, "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
            lines = _plans_in(folder / name)
            if lines:
                texts = [text.strip() for line in lines for text in line.split(",") if text.strip()]
                return [os.path.relpath(folder / text, start) for text in texts], f"ini fxbucket_plans of {folder / name}"
    return [], ""


def _plans_in(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise FxbucketError(f"{file} cannot be read: {error}") from None
    if file.suffix == ".toml":
        return _of_toml(file, text)
    # Sections of other tools may have a bare % in them, or a key twice, which is no error of ours.
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise FxbucketError(f"{file} is no ini file: {str(error).splitlines()[0]}") from None
    return parser.get(_INI[file.name], "fxbucket_plans", fallback="").splitlines()


def _of_toml(file: Path, text: str) -> list[str]:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FxbucketError(f"{file} is not TOML: {error}") from None
    # pytest 9 has files of its own, with a table [pytest], and options in [tool.pytest] itself, too; those of
    # [tool.pytest.ini_options] may be one text with line ends.
    tool = (read if file.name in _OWN else read.get("tool", {})).get("pytest", {})
    given = tool.get("ini_options", tool).get("fxbucket_plans", [])
    return given.splitlines() if isinstance(given, str) else [str(line) for line in given]
