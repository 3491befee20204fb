"""Plan files: from a path to the plans in it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.matrix import rows
from pytest_fxbucket.plan.read import read_plan
from pytest_fxbucket.plan.schema import Plan

_DIGITS = re.compile(r"[0-9](_?[0-9]){999}")
_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A ``[[matrix]]`` row that is no plan, and why."""

    name: str
    """Its id, or its number from 1 if it has none of its own."""
    error: PlanError


def load_plans(path: Path) -> list[Plan]:
    """Read a plan file: the base plan first, then one for each ``[[matrix]]`` row in order.

    Raises PlanError, one sentence that names the file, the table and the key.
    """
    return _all_well(load_rows(path))


def load_rows(path: Path) -> list[Plan | BrokenRow]:
    """Read a plan file as :func:`load_plans` does, but for rows that are no plans: the others may be run.

    Raises PlanError if the file cannot be read, or if what stands above the rows is no plan.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: the plan cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError(f"{path}:{line}: a plan must be UTF-8, and byte {error.start} is not") from error
    return _rows(text, path)


def parse_plans(text: str, path: Path) -> list[Plan]:
    """Read the text of a plan file as :func:`load_plans` does; ``path`` is kept in the plans and named in errors."""
    return _all_well(_rows(text, path))


def _all_well(found: list[Plan | BrokenRow]) -> list[Plan]:
    plans = []
    for one in found:
        if isinstance(one, BrokenRow):
            raise one.error
        plans.append(one)
    return plans


def _rows(text: str, path: Path) -> list[Plan | BrokenRow]:
    where = str(path)
    base = _parse(text, where)
    matrix = base.pop("matrix", [])
    found: list[Plan | BrokenRow] = [read_plan(base, path, None, where)]
    for row in rows(base, matrix, where):
        try:
            if isinstance(row.tables, PlanError):
                raise row.tables
            found.append(read_plan(row.tables, path, row.name, row.where))
        except PlanError as error:
            found.append(BrokenRow(row.name, error))
    return found


def _parse(text: str, where: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        last = max(1, len(text.splitlines()))
        line = int(place["line"]) if place and place["line"] else last
        words = _PLACE.sub("", message)
        raise PlanError(f"{where}:{line}: this is not TOML: {words[:1].lower()}{words[1:]}") from error
    except ValueError as error:  # of Python's own: it reads no longer ones
        raise PlanError(f"{where}{_line_of_digits(text)}: a number there has more digits than Python reads") from error
    except RecursionError as error:
        raise PlanError(f"{where}: this is not a plan: its values are nested too deep") from error


def _line_of_digits(text: str) -> str:
    """Where the first number is that is so long, as ``:line``."""
    found = _DIGITS.search(text)
    return f":{text.count(chr(10), 0, found.start()) + 1}" if found else ""
