"""Whether two stored measurements may be compared at all: the same plan, doing the same work on the same kind of machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_fxbucket.bench.record import Record

_MOST = 3  # keys of the workload that are named


def comparable(old: Record, new: Record) -> list[str]:
    """Why not, a phrase for each reason; empty if they are.

    What the comparison is about may differ: the commit, the pass, `[bucket]` and `[overlap]`; torch and Python may too.
    """
    reasons = [] if old.title == new.title else [f"another plan: {old.title}, not {new.title}"]
    then, now = old.to_dict(), new.to_dict()
    differences = list(_differences(then["machine"], now["machine"]))
    if differences:
        reasons.append(f"another machine: {', '.join(differences)}")
    for key in ("backend", "ranks"):
        reasons += _differences(then[key], now[key], key)
    if old.has_priority != new.has_priority:
        reasons.append(
            f"ranks ran at real-time priority {'then and do not now' if old.has_priority else 'not then, and do now'}"
        )
    for table in sorted({*then["workload"], *now["workload"]}):
        differences = list(_differences(then["workload"].get(table), now["workload"].get(table), f"[{table}]"))
        more = f" and {len(differences) - _MOST} more" if len(differences) > _MOST else ""
        if differences:
            reasons.append(", ".join(differences[:_MOST]) + more)
    return reasons


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """`[model] args.layers was 2 and is 4`, for each value that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            between = "" if not where else " " if where.endswith("]") else "."
            yield from _differences(old.get(key), new.get(key), f"{where}{between}{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(pair[0], pair[1], f"{where}[{at}]" if len(old) > 1 else where)
    elif _text(old) != _text(new):
        then, now = _shown(old), _shown(new)
        if then == now:
            then, now = _text(old), _text(new)
        yield f"{where} was {then} and is {now}"


def _text(value: Any) -> str:
    """What is compared: in JSON true is not 1, and not a number is itself."""
    return json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a table of {len(value)}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) if value else "none"
    return "not there" if value is None else str(value)
