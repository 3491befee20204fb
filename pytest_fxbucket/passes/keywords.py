"""The pass's options as keyword arguments: the keys of a plan file's ``[bucket]`` and ``[overlap]``, read by the same rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.read import read_plan
from pytest_fxbucket.plan.schema import Bucket, Plan
from pytest_fxbucket.units import nearest


class BucketingOptions(TypedDict, total=False):
    """Each as the key of its name in a plan file, with the same default; but ``unplanned`` is "allow"."""

    by: Literal["plan", "size"]
    layout: Literal["registration", "execution"]
    dtypes: Literal["separate", "mixed"]
    cap_mb: float | Sequence[float]
    packer: str
    unplanned: Literal["error", "allow", "root"]
    prefetch: int
    defer_reduce: bool
    insert_overlap_deps: bool
    gather_group: Literal["same", "own"]
    launch_at: Mapping[str, Mapping[str, str]]
    wait_before: Mapping[str, Mapping[str, str]]


def plan_of(entries: object, options: Mapping[str, Any], where: str) -> Plan:
    """``entries`` and ``options`` as a plan file would hold them; only its ``bucket`` and ``overlap`` mean anything.

    Raises :class:`PlanError`, beginning with ``where``, for unknown options, values that they do not take, and options that
    contradict each other.
    """
    tables: dict[str, dict[str, object]] = {"bucket": {}, "overlap": {}}
    taken = set(BucketingOptions.__annotations__)
    for name, value in options.items():
        if name not in taken:
            raise PlanError(f'{where} takes no option "{name}"{nearest(name, sorted(taken)) or _known(taken)}')
        table = "bucket" if name in {field.name for field in dataclasses.fields(Bucket)} else "overlap"
        tables[table][name] = list(value) if isinstance(value, tuple) else value
    if entries is not None and entries != () and entries != []:
        tables["bucket"]["plan"] = entries
    if tables["bucket"].get("by") != "size":
        tables["bucket"].setdefault("unplanned", "allow")
    raw = {"graph": {"factory": "compiled:graph"}, "parallel": {"dp_shard": 2}, **tables}
    plan = read_plan(raw, Path(where), None, where)
    if len(plan.bucket.cap_mb) > 1 and any("*" in selector for entry in plan.bucket.plan for selector in entry.selectors):
        raise PlanError(f"{where}: a cap for each entry cannot be told where an entry is a star; write the entries out")
    return plan


def _known(names: set[str]) -> str:
    return f"; known are {', '.join(sorted(names))}"
