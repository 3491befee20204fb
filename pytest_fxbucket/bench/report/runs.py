"""Stored runs by what they can be held against: runs on another machine, or of another step, are shown apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.words import machine_text

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that can be held against each other."""

    differs: tuple[str, ...]
    """From this run in what, as clauses; empty for those that can be held against it."""
    records: tuple[Record, ...]
    """Oldest first."""


def grouped(record: Record, stored: Sequence[Record]) -> list[Runs]:
    """This run's group first, with ``record`` as its last, then the others in order of their newest run, latest first."""
    groups: dict[str, list[Record]] = {}
    for one in stored:
        groups.setdefault(_key(one), []).append(one)
    ours = [one for one in groups.pop(_key(record), []) if one != record]
    others = sorted(groups.values(), key=lambda group: (group[-1].time, _key(group[-1])), reverse=True)
    return [Runs((), (*ours, record)), *(Runs(_differences(record, group[-1]), tuple(group)) for group in others)]


def _key(record: Record) -> str:
    return json.dumps([_plain(value) for value in _compared(record).values()], sort_keys=True, default=str)


def _compared(record: Record) -> dict[str, Any]:
    return {
        "machine": record.machine,
        "back end": record.backend,
        "ranks": record.ranks,
        "pass": record.pass_name,
        "step": record.workload,
    }


def _differences(record: Record, other: Record) -> tuple[str, ...]:
    ours, theirs = _compared(record), _compared(other)
    found = [name for name in ours if _plain(ours[name]) != _plain(theirs[name])]
    said = {"machine": machine_text(other.machine), "step": "model, mesh or optimizer of the plan were others"}
    return tuple(said.get(name) or f"{name} {theirs[name]}" for name in found)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=list))
