"""What a part of ``make gpu`` found: rows, kept in one JSON file and printed as one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ALL = "all of it"
"""What was tried of a part for which the machine lacks something, and of one that did not come to its end."""
Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was tried. ``said``: figures of what passed, why the rest did not."""

    part: str
    what: str
    outcome: Outcome
    said: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Results:
    """All parts that ran on one machine with one commit."""

    machine: Mapping[str, str]
    """What it is: GPU, driver, torch, CUDA, NCCL, commit."""
    parts: Mapping[str, Sequence[Row]]

    def has_run(self, name: str) -> bool:
        """Whether the part ran to its end; one that the machine lacked something for then may have it now."""
        rows = self.parts.get(name, ())
        return bool(rows) and all(row.what != ALL for row in rows)

    def with_part(self, name: str, rows: Sequence[Row]) -> Results:
        """The same with the rows of a part that ran, or ran again."""
        return Results(self.machine, {**self.parts, name: tuple(rows)})

    def write(self, path: Path) -> None:
        """Write them as JSON, whole or not at all."""
        parts = {name: [asdict(row) for row in rows] for name, rows in self.parts.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"machine": dict(self.machine), "parts": parts}, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def read(path: Path, machine: Mapping[str, str]) -> Results:
    """What an earlier run on the same machine, with the same commit and versions, left in ``path``; else nothing."""
    if not path.exists():
        return Results(machine, {})
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["machine"] != dict(machine):
        return Results(machine, {})
    return Results(machine, {name: tuple(Row(**row) for row in rows) for name, rows in found["parts"].items()})


def table(results: Results, names: Sequence[str]) -> str:
    """A line for each of ``names``, which are all parts there are, and for each thing that did not pass; Markdown."""
    lines = [", ".join(f"{name} {value}" for name, value in results.machine.items()), ""]
    lines += ["| part | passed | failed | skipped | seconds | figures |", "|---|---|---|---|---|---|"]
    for name in names:
        rows = results.parts.get(name)
        if rows is None:
            lines.append(f"| {name} | never run | | | | |")
            continue
        counts = [sum(row.outcome == outcome for row in rows) for outcome in ("passed", "failed", "skipped")]
        figures = "; ".join(f"{row.what}: {row.said}" for row in rows if row.outcome == "passed" and row.said)
        lines.append(f"| {name} | {' | '.join(map(str, counts))} | {sum(row.seconds for row in rows):.0f} | {figures} |")
    rest = [row for name in names for row in results.parts.get(name, ()) if row.outcome != "passed"]
    return "\n".join([*lines, "", *(f"{row.outcome.upper()} {row.part}: {row.what}: {row.said}" for row in rest)]).rstrip()
