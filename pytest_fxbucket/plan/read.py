"""From the parsed tables of a plan file to a Plan: unknown names, missing keys, and keys that contradict each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.agree import agree
from pytest_fxbucket.plan.rules import Rule, wrong
from pytest_fxbucket.plan.schema import Plan, may_be_several, tables
from pytest_fxbucket.units import nearest


def read_plan(raw: Mapping[str, object], path: Path, matrix_id: str | None, where: str) -> Plan:
    """Make a Plan from tables as tomllib gives them; raises PlanError, one sentence that begins with ``where``."""
    for name in raw:
        if name not in tables():
            raise PlanError(f"{where}: there is no table [{name}]{_where_else(name, '', [*tables(), 'matrix'])}")
    parts: dict[str, Any] = {name: _read_tables(name, raw[name], where) for name in tables() if name in raw}
    plan = Plan(path=path, matrix_id=matrix_id, **parts)
    agree(plan, where)
    return plan


def known_key(table: str, key: str, inside: str) -> None:
    """Raise PlanError, beginning with ``inside``, with the nearest known one if ``[table] key`` is not in the schema."""
    names = [spec.name for spec in dataclasses.fields(tables()[table])]
    if key not in names:
        raise PlanError(f'{inside} has no key "{key}"{_where_else(key, table, names)}')


def _read_tables(name: str, raw: object, where: str) -> object:
    """One table, or all of those that there may be several of, as a tuple."""
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
