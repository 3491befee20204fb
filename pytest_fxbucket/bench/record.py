"""What is stored of one plan's measurement: plain JSON in pytest-benchmark's extra info, read back with care."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pytest_fxbucket.bench.record_rules import FORMAT, RULES, SPELLING, is_too_deep
from pytest_fxbucket.bench.series import Samples
from pytest_fxbucket.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement of one plan. Nothing in it is absolute: a clone elsewhere has the same identity."""

    plan: str
    """Path of the plan file from rootdir, with slashes."""
    row: str | None
    """Id of its matrix row."""
    workload: Mapping[str, Any]
    """Plan tables as JSON: what must be equal for two runs to be comparable."""
    commit: str | None
    """Sha of HEAD in the plan's repository; None: it is in none."""
    dirty: bool
    """Files of that repository differ from the commit."""
    machine: Mapping[str, Any]
    """Kind of machine, see `machine_kind`; no name of a host."""
    torch: str
    python: str
    backend: str
    ranks: int
    pass_name: str
    """"pass" in the JSON."""
    time: str
    """When it was measured: ISO 8601 with a zone."""
    samples: Mapping[str, Samples]
    """Seconds of each step, by variant; of "bucketed" and "unbucketed" at least, and alike in sets and rounds."""
    warmup_rounds: Sequence[int]
    is_stable: bool
    has_priority: bool
    """All ranks ran before everything else on the machine, see :mod:`pytest_fxbucket.bench.priority`."""
    capture_s: float
    pass_s: float
    graphs: Mapping[str, Mapping[str, Any]]
    """By variant: digest, launches, bytes, peak_bytes of each rank, and buckets with label, direction, bytes, exposed_s,
    in_flight_s."""

    @property
    def title(self) -> str:
        """The plan as people type it."""
        return self.plan if self.row is None else f"{self.plan}[{self.row}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the format's number first."""
        named = {SPELLING.get(each.name, each.name): _plain(getattr(self, each.name)) for each in fields(self)}
        return {"format": FORMAT, **named}

    @classmethod
    def from_dict(cls, data: object, where: str) -> Record:
        """Read what `to_dict` gave. Raises BenchmarkError that begins with `where` for another format, or for damage."""
        if not isinstance(data, Mapping):
            raise BenchmarkError(
                f"{where}: the stored measurement is no table; it is damaged: restore the file, or measure again"
            )
        if is_too_deep(data):
            raise BenchmarkError(
                f"{where}: the measurement is nested too deeply; it is damaged: restore the file, or measure again"
            )
        if type(data.get("format")) is not int or data["format"] != FORMAT:  # true equals 1
            raise BenchmarkError(
                f"{where}: the measurement has format {data.get('format')!r} and this version reads {FORMAT}; compare with the "
                "pytest-fxbucket that wrote it, or measure again"
            )
        for name, rule in RULES.items():
            if name not in data:
                raise BenchmarkError(
                    f"{where}: the measurement lacks {name!r}; it is damaged: restore the file, or measure again"
                )
            problem = rule(data[name])
            if problem:
                raise BenchmarkError(
                    f"{where}: {name!r} of the measurement {problem}; it is damaged: restore the file, or measure again"
                )
        values = {each.name: data[SPELLING.get(each.name, each.name)] for each in fields(cls)}
        samples = {name: tuple(map(tuple, sets)) for name, sets in values["samples"].items()}
        return cls(**values | {"samples": samples})


def _plain(value: Any) -> Any:
    """The value with tuples as lists, so that what is written equals what is read."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
