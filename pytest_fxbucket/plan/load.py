"""Plan files: from a path to the plans in it, one for each row of ``[[matrix]]``."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import Cluster
from pytest_fxbucket.plan.consistency import agree
from pytest_fxbucket.plan.rules import Rule, wrong
from pytest_fxbucket.plan.schema import Plan, field_of, may_be_several, tables
from pytest_fxbucket.words import nearest

# Far below the 4300 digits that Python reads by default: the limit can be set.
_DIGITS = re.compile(r"[0-9](_?[0-9]){999,}")
# The end of tomllib's messages; before Python 3.14 its errors have no attribute for the place.
_PLACE = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A ``[[matrix]]`` row that cannot be read as a plan, and the error."""

    name: str
    """Its id, or its number from 1 if it has none of its own."""
    error: PlanError


def load_plans(path: Path) -> list[Plan]:
    """Read a plan file: the base plan first, then one for each ``[[matrix]]`` row in order.

    Raises PlanError, one sentence that names the file, the table and the key.
    """
    return _all_well(load_rows(path))


def load_rows(path: Path) -> list[Plan | BrokenRow]:
    """Read a plan file as :func:`load_plans` does, with a :class:`BrokenRow` for each row that is no plan: the others can run.

    Raises PlanError if the file cannot be read, or if the base plan above the rows is none.
    """
    return parse_rows(_text(path, "plan"), path)


def load_cluster(path: Path) -> Cluster:
    """Read a file of the keys of ``[cluster]``.

    Raises PlanError, one sentence that names the file and the key.
    """
    return cast(Cluster, _read_table("cluster", _parse(_text(path, "preset"), str(path)), f"{path}:"))


def _text(path: Path, what: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: the {what} cannot be read: {error.strerror or error}") from error
    try:
        # tomllib refuses the byte order mark that some editors write.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError(f"{path}:{line}: a {what} must be UTF-8, and byte {error.start} is not") from error


def parse_plans(text: str, path: Path) -> list[Plan]:
    """Read the text of a plan file as :func:`load_plans` does; ``path`` is kept in the plans and named in errors."""
    return _all_well(parse_rows(text, path))


def _all_well(found: list[Plan | BrokenRow]) -> list[Plan]:
    plans = []
    for one in found:
        if isinstance(one, BrokenRow):
            raise one.error
        plans.append(one)
    return plans


def parse_rows(text: str, path: Path) -> list[Plan | BrokenRow]:
    """Read the text of a plan file as :func:`load_rows` does."""
    where = str(path)
    base = _parse(text, where)
    matrix = base.pop("matrix", [])
    found: list[Plan | BrokenRow] = [read_plan(base, path, None, where)]
    if not isinstance(matrix, list) or not all(isinstance(row, Mapping) for row in matrix):
        raise wrong(f"{where}: [[matrix]]", "tables, each under [[matrix]]", matrix)
    seen: set[str] = set()
    for number, row in enumerate(matrix, 1):
        name = str(number)
        # A row that is wrong becomes a :class:`BrokenRow`, so that the others can run; a wrong base plan raises.
        try:
            matrix_id = _id(row, number, where)
            inside = f'{where}: [[matrix]] "{matrix_id}"'
            if matrix_id in seen:
                raise PlanError(f"{inside} is there twice; each id must be its own")
            # Only an id that no other row has becomes the name; a row that repeats one keeps its number.
            seen.add(name := matrix_id)
            found.append(read_plan(_with_overrides(base, row, inside), path, matrix_id, inside))
        except PlanError as error:
            found.append(BrokenRow(name, error))
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
    except ValueError as error:  # Python's limit on the digits of an int, which TOML does not have
        raise PlanError(f"{where}{_line_of_digits(text)}: a number there has more digits than Python reads") from error
    except RecursionError as error:
        raise PlanError(f"{where}: this is not a plan: its values are nested too deep") from error


def _line_of_digits(text: str) -> str:
    """Line of the first number with more digits than Python reads, as ``:line``; empty if there is none."""
    for found in _DIGITS.finditer(text):
        # Digits may also be in a comment or a string. What ends with the number that cannot be read is the first to raise so.
        try:
            tomllib.loads(text[: found.end()])
        except tomllib.TOMLDecodeError:
            continue
        except ValueError:
            return f":{text.count(chr(10), 0, found.start()) + 1}"
    return ""


# From the parsed tables of a plan file to a Plan: unknown names, missing keys, and keys that contradict each other.


def read_plan(raw: Mapping[str, object], path: Path, matrix_id: str | None, where: str) -> Plan:
    """Make a Plan from tables as tomllib gives them; raises PlanError, one sentence that begins with ``where``."""
    for name in raw:
        if name not in tables():
            raise PlanError(f"{where}: there is no table [{name}]{_where_else(name, '', [*tables(), 'matrix'])}")
    parts: dict[str, Any] = {field_of(name): _read_tables(name, raw[name], where) for name in tables() if name in raw}
    plan = Plan(path=path, matrix_id=matrix_id, **parts)
    agree(plan, where)
    return plan


def known_key(table: str, key: str, inside: str) -> None:
    """Raise PlanError if ``[table] key`` is not in the schema: it begins with ``inside`` and names the nearest known key."""
    names = [spec.name for spec in dataclasses.fields(tables()[table])]
    if key not in names:
        raise PlanError(f'{inside} has no key "{key}"{_where_else(key, table, names)}')


def _read_tables(name: str, raw: object, where: str) -> object:
    """One table; for a name that may have several tables, all of them as a tuple."""
    if not may_be_several(name):
        return _read_table(name, raw, f"{where}: [{name}]")
    if not isinstance(raw, list):
        return (_read_table(name, raw, f"{where}: [{name}]"),)
    return tuple(_read_table(name, each, f"{where}: [[{name}]] {number}:") for number, each in enumerate(raw, 1))


def _read_table(name: str, raw: object, inside: str) -> object:
    if not isinstance(raw, Mapping):
        raise wrong(inside.removesuffix(":"), "a table", raw)
    for key in raw:
        known_key(name, key, inside.removesuffix(":"))
    values: dict[str, object] = {}
    for spec in dataclasses.fields(tables()[name]):
        rule = cast(Rule, spec.metadata["rule"])
        if spec.name in raw:
            values[spec.name] = rule.read(raw[spec.name], f"{inside} {spec.name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise PlanError(f"{inside} {spec.name} is missing; it must be {rule.expects}")
    return tables()[name](**values)


def _where_else(key: str, table: str, known: list[str]) -> str:
    for other, cls in tables().items():
        if other != table and key in cls.__dataclass_fields__:
            return f"; {key} is a key of [{other}]"
    return nearest(key, known) or f"; known are {', '.join(known)}"


# ``[[matrix]]``: rows that override keys of the plan.


# Goldens and folders are named by it, so it must still tell rows apart where dots and dashes at the ends of names are cut.
_ID = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9_])?")


def _id(row: Mapping[str, object], number: int, where: str) -> str:
    if "id" not in row:
        raise PlanError(f"{where}: [[matrix]] row {number} has no id; give it one, for the name of its items")
    matrix_id = row["id"]
    if not isinstance(matrix_id, str) or not _ID.fullmatch(matrix_id):
        expected = "a string of at most 100 letters, digits, _ . and -, with no . or - at its ends"
        raise wrong(f"{where}: [[matrix]] row {number}: id", expected, matrix_id)
    return matrix_id


def _with_overrides(base: Mapping[str, object], row: Mapping[str, object], where: str) -> dict[str, object]:
    """All tables of a row: ``base`` with the row's keys put in. Only names of keys are checked here, not their values.

    Keys are nested (``parallel.tp = 1``) or quoted (``"parallel.tp" = 1``), so a table keeps the base's other keys. The value
    of a key replaces the base's value, even if it is a table (``model.args``). A list of tables (``optimizer = [{ ... }]``)
    replaces all tables of that name.
    """
    overrides = {key: value for key, value in row.items() if key != "id"}
    if not overrides:
        raise PlanError(f"{where} overrides no key; write one such as parallel.param_dtype, or take the row out")
    merged = dict(base)
    written: set[tuple[str, str]] = set()
    for name, value in overrides.items():
        if name in tables() and may_be_several(name) and isinstance(value, list):
            merged[name] = value
            continue
        for table, key, inner in _keys(name, value, where):
            # To TOML ``parallel.tp`` and ``"parallel.tp"`` are two keys, so it takes both.
            if (table, key) in written:
                raise PlanError(f"{where}: {table}.{key} is set twice; set it once")
            written.add((table, key))
            # A new dict, since the rows behind this one begin with the same ``base``.
            merged[table] = {**_one(merged.get(table, {}), table, key, where), key: inner}
    return merged


def _one(old: object, table: str, key: str, where: str) -> Mapping[str, object]:
    """The table of ``base`` that a row's key is set in; raises PlanError if there are several, since any could be meant."""
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
