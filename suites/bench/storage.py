"""Stored runs for tests: files as pytest-benchmark writes them, in a project that is a git repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_fxbucket.bench.store import StoredMatch, find
from suites.bench.records import fields, record
from suites.cli.small_repository import SmallRepository

KIND = "Linux-CPython-3.11-64bit"
PLAN = "plans/tiny.toml"


def file_text(*records: dict[str, Any], compared: str | None = None) -> str:
    """A file of pytest-benchmark's with these measurements, each with an entry of its unbucketed variant beside it."""
    entries: list[dict[str, Any]] = [{"name": "test_other", "extra_info": {}, "stats": {}}]
    beside = {"fxbucket_compared": {"with": "latest", "outcome": compared, "summary": "x"}} if compared else {}
    for each in records:
        other = {"format": 1, "plan": each.get("plan"), "row": each.get("row"), "variant": "unbucketed"}
        entries += [{"name": "benchmark", "extra_info": {"fxbucket": one, **beside}, "stats": {}} for one in (other, each)]
    return json.dumps({"benchmarks": entries, "version": "5.3.1", "datetime": "2026-01-01T00:00:00+00:00"})


class Project(SmallRepository):
    """A repository with a plan, and runs that are stored in it."""

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.write(PLAN, "a = 1\n")
        self.first = self.commit()
        self.storage = self.top / ".benchmarks"

    def store_text(self, number: int, text: str | bytes, kind: str = KIND) -> Path:
        """Store what may be no run."""
        path = self.write(f".benchmarks/{kind}/{number:04}_run.json", "")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def store(self, number: int = 1, kind: str = KIND, name: str = "run", compared: str | None = None, **changed: Any) -> Path:
        """Store a run of `self.first`; the greater its number, the later it was measured."""
        values = {"commit": self.first, "time": f"2026-11-21T10:{number % 60:02}:00+00:00", "seed": number, **changed}
        return self.write(f".benchmarks/{kind}/{number:04}_{name}.json", file_text(fields(**values), compared=compared))


def found(what: str, project: Project, **now: object) -> StoredMatch:
    """What is found for a run of later than all that are stored."""
    values = {"commit": None, "time": "2026-12-24T10:00:00+00:00", **now}
    return find(what, record(**values), project.storage, project.top)  # type: ignore[arg-type]  # fields by name


def file_of(it: StoredMatch) -> str:
    assert it.run is not None, it.note
    return it.run.file.name
