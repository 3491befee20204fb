"""Plan files: from a path to the plans in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.matrix import rows
from pytest_fxbucket.plan.read import read_plan
from pytest_fxbucket.plan.schema import Plan

_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


def load_plans(path: Path) -> list[Plan]:
    """Read a plan file: the base plan first, then one for each ``[[matrix]]`` row in order.

    Raises PlanError, one sentence that names the file, the table and the key.
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
    return parse_plans(text, path)


def parse_plans(text: str, path: Path) -> list[Plan]:
    """Read the text of a plan file as :func:`load_plans` does; ``path`` is kept in the plans and named in errors."""
    where = str(path)
    base = _parse(text, where)
    matrix = base.pop("matrix", [])
    plans = [read_plan(base, path, None, where)]
    for matrix_id, inside, tables in rows(base, matrix, where):
        plans.append(read_plan(tables, path, matrix_id, inside))
    return plans


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
    except RecursionError as error:
        raise PlanError(f"{where}: this is not a plan: its values are nested too deep") from error
