"""``[[matrix]]``: rows that override keys of the plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.read import known_key
from pytest_fxbucket.plan.rules import wrong
from pytest_fxbucket.plan.schema import may_be_several, tables
from pytest_fxbucket.units import nearest

# Goldens and folders are named by it, so it must still tell rows apart where dots and dashes at the ends of names are cut.
_ID = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?")

Tables = dict[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its id, the prefix of errors about it, and its whole tables, or what is wrong with it."""

    name: str
    """Its number from 1 where it has no id of its own."""
    where: str
    tables: Tables | PlanError


def rows(base: Mapping[str, object], raw: object, where: str) -> Iterator[Row]:
    """Yield each row, in the file's order.

    Keys are nested (``parallel.tp = 1``) or quoted (``"parallel.tp" = 1``); a key replaces the base's whole value, and a
    list of tables (``optimizer = [{ ... }]``) replaces all of those of that name. A row has a PlanError instead of tables for
    an id that is missing, wrong or used twice and for unknown keys; values are not looked at. Raises PlanError if there are no
    rows.
    """
    if not isinstance(raw, list) or not all(isinstance(row, Mapping) for row in raw):
        raise wrong(f"{where}: [[matrix]]", "tables, each under [[matrix]]", raw)
    seen: set[str] = set()
    for number, row in enumerate(cast("list[Mapping[str, object]]", raw), 1):
        name = str(number)
        inside = where
        try:
            matrix_id = _id(row, number, where)
            inside = f'{where}: [[matrix]] "{matrix_id}"'
            if matrix_id in seen:
                raise PlanError(f"{inside} is there twice; each id must be its own")
            seen.add(name := matrix_id)
            yield Row(name, inside, _tables(base, row, inside))
        except PlanError as error:
            yield Row(name, inside, error)


def _tables(base: Mapping[str, object], row: Mapping[str, object], where: str) -> Tables:
    overrides = {key: value for key, value in row.items() if key != "id"}
    if not overrides:
        raise PlanError(f"{where} overrides no key; write one such as parallel.param_dtype, or take the row out")
    return _merge(base, overrides, where)


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
    for name, value in overrides.items():
        if name in tables() and may_be_several(name) and isinstance(value, list):
            merged[name] = value
            continue
        for table, key, inner in _keys(name, value, where):
            if (table, key) in written:
                raise PlanError(f"{where}: {table}.{key} is set twice; set it once")
            written.add((table, key))
            merged[table] = {**_one(merged.get(table, {}), table, key, where), key: inner}
    return merged


def _one(old: object, table: str, key: str, where: str) -> Mapping[str, object]:
    """The table that a key is set in; of several nobody can tell which."""
    if isinstance(old, list):
        if len(old) > 1:
            example = f"{table} = [{{ {_first_key(table)} = ... }}]"
            raise PlanError(
                f"{where}: {table}.{key} could be of any of {len(old)} [[{table}]]; write all that the row has, as in {example}"
            )
        return cast(Mapping[str, object], old[0] if old else {})
    return cast(Mapping[str, object], old)


def _keys(name: str, value: object, where: str) -> Iterator[tuple[str, str, object]]:
    """Yield table, key and value of what a row holds under one name."""
    table, dot, key = name.partition(".")
    if table not in tables():
        raise PlanError(f'{where}: there is no table "{table}"{nearest(table, list(tables()))}')
    if not dot and not isinstance(value, Mapping):
        raise wrong(f"{where}: {table}", f"followed by one of its keys, as in {table}.{_first_key(table)} = ...", value)
    pairs = {key: value} if dot else cast(Mapping[str, object], value)
    for inner, inner_value in pairs.items():
        known_key(table, inner, f"{where}: [{table}]")
        yield table, inner, inner_value


def _first_key(table: str) -> str:
    return dataclasses.fields(tables()[table])[0].name
