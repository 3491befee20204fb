"""``[[matrix]]``: rows that override keys of the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.read import known_key
from pytest_fxbucket.plan.rules import nearest, wrong
from pytest_fxbucket.plan.schema import tables

# Goldens and folders are named by it, so it must still tell rows apart where dots and dashes at the ends of names are cut.
_ID = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?")

Tables = dict[str, object]


def rows(base: Mapping[str, object], raw: object, where: str) -> Iterator[tuple[str, str, Tables]]:
    """Yield id, error prefix and whole tables of each row, in the file's order.

    Keys are nested (``parallel.tp = 1``) or quoted (``"parallel.tp" = 1``); a key replaces the base's whole value.
    Raises PlanError for an id that is missing, wrong or used twice and for unknown keys; values are not looked at.
    """
    if not isinstance(raw, list) or not all(isinstance(row, Mapping) for row in raw):
        raise wrong(f"{where}: [[matrix]]", "tables, each under [[matrix]]", raw)
    seen: set[str] = set()
    for number, row in enumerate(cast("list[Mapping[str, object]]", raw), 1):
        matrix_id = _id(row, number, where)
        inside = f'{where}: [[matrix]] "{matrix_id}"'
        if matrix_id in seen:
            raise PlanError(f"{inside} is there twice; each id must be its own")
        seen.add(matrix_id)
        overrides = {key: value for key, value in row.items() if key != "id"}
        if not overrides:
            raise PlanError(f"{inside} overrides no key; write one such as parallel.param_dtype, or take the row out")
        yield matrix_id, inside, _merge(base, overrides, inside)


def _id(row: Mapping[str, object], number: int, where: str) -> str:
    if "id" not in row:
        raise PlanError(f"{where}: [[matrix]] row {number} has no id; give it one, for the name of its items")
    matrix_id = row["id"]
    if not isinstance(matrix_id, str) or not _ID.fullmatch(matrix_id):
        expected = "a string of at most 100 letters, digits, _ . and -, with no . or - at its ends"
        raise wrong(f"{where}: [[matrix]] row {number}: id", expected, matrix_id)
    return matrix_id


def _merge(base: Mapping[str, object], overrides: Mapping[str, object], where: str) -> Tables:
    merged: Tables = dict(base)
    written: set[tuple[str, str]] = set()
    for table, key, value in _flat(overrides, where):
        if (table, key) in written:
            raise PlanError(f"{where}: {table}.{key} is set twice; set it once")
        written.add((table, key))
        old = merged.get(table, {})
        if isinstance(old, list):
            raise PlanError(
                f"{where}: {table}.{key} cannot be set, since there are {len(old)} [[{table}]]; write a plan of its own"
            )
        merged[table] = {**cast(Mapping[str, object], old), key: value}
    return merged


def _flat(overrides: Mapping[str, object], where: str) -> Iterator[tuple[str, str, object]]:
    for name, value in overrides.items():
        table, dot, key = name.partition(".")
        if table not in tables():
            raise PlanError(f'{where}: there is no table "{table}"{nearest(table, list(tables()))}')
        if dot:
            pairs: Mapping[str, object] = {key: value}
        elif isinstance(value, Mapping):
            pairs = value
        else:
            raise wrong(f"{where}: {table}", f"followed by one of its keys, as in {_example(table)}", value)
        for inner, inner_value in pairs.items():
            known_key(table, inner, where)
            yield table, inner, inner_value


def _example(table: str) -> str:
    return f"{table}.{next(iter(tables()[table].__dataclass_fields__))} = ..."
