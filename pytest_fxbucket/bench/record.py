"""The record of one plan's measurement: plain JSON in pytest-benchmark's extra info, read back strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from pytest_fxbucket.bench.stats import LEAST_S, MOST_S
from pytest_fxbucket.errors import BenchmarkError

FORMAT = 1
_DEEPEST = 64  # tables and lists within each other: far more than a plan has, far fewer than Python can walk

Seconds = Annotated[float, Meta(ge=0, le=MOST_S)]
Rounds = Annotated[tuple[Annotated[float, Meta(ge=LEAST_S, le=MOST_S)], ...], Meta(min_length=1)]
StoredSamples = Annotated[tuple[Rounds, ...], Meta(min_length=1)]
Sha = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}([0-9a-f]{24})?\Z")]


class MachineKind(TypedDict):
    """A kind of machine, see ``machine_kind``; it has no host's name."""

    system: str
    arch: str
    cpu: str
    cores: Annotated[int, Meta(ge=1)]
    gpus: list[str]


class BucketTime(TypedDict):
    """One launch of a graph."""

    label: str
    direction: str
    bytes: int
    exposed_s: Seconds | None
    """None, as the next: it could not be measured on that back end."""
    in_flight_s: Seconds | None


class GraphFacts(TypedDict):
    """Facts of one variant's graphs."""

    digest: str
    launches: int
    bytes: int
    peak_bytes: list[int]
    """Peak memory of each rank."""
    buckets: list[BucketTime]


Share = Annotated[float, Meta(ge=-1, le=1)]


class PipelineFacts(TypedDict):
    """How pipeline stages were run, and bubbles: the idle shares of the ranks' time while the schedule runs."""

    schedule: str
    stages: Annotated[int, Meta(ge=1)]
    ranks: Annotated[int, Meta(ge=1)]
    """Number of ranks along pp."""
    microbatches: Annotated[int, Meta(ge=1)]
    bubble: dict[str, Share | None]
    """By variant the measured bubble, the median of traced steps; None if no step was traced."""
    bubble_of_table: Share
    """The bubble by the schedule's table, with a backward as long as two forwards."""
    bubble_by_book: Share | None
    """(p - 1) / (m + p - 1), for GPipe and 1F1B; else None."""


class Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="format",
    tag=FORMAT,
    rename={"pass_name": "pass"},
):
    """One measurement of one plan. No path in it is absolute, so that a clone elsewhere measures the same plan."""

    plan: str
    """Path of the plan file from rootdir, with slashes."""
    row: str | None
    """Id of its matrix row."""
    workload: Mapping[str, Any]
    """The plan tables, as JSON, that must be equal for two runs to be comparable."""
    commit: Sha | None
    """HEAD in the plan's repository; None if it is in none."""
    dirty: bool
    """Whether files of that repository differ from the commit."""
    machine: MachineKind
    torch: str
    python: str
    backend: str
    ranks: Annotated[int, Meta(ge=1)]
    pass_name: str
    time: str
    """When it was measured: ISO 8601 with a zone."""
    samples: Mapping[str, StoredSamples]
    """Seconds of each step, by variant, of which "bucketed" and "unbucketed" must be there; all have equal sets and rounds."""
    warmup_rounds: tuple[Annotated[int, Meta(ge=0)], ...]
    is_stable: bool
    has_priority: bool
    """Whether all ranks ran before everything else on the machine, see ``come_first``."""
    capture_s: Seconds
    pass_s: Seconds
    graphs: Mapping[str, GraphFacts]
    """By variant."""
    pipeline: PipelineFacts | None = None
    """Of a plan with pipeline stages."""

    def __post_init__(self) -> None:
        """Raise ValueError for errors that the fields' types do not catch."""
        try:
            is_time = datetime.fromisoformat(self.time).tzinfo is not None
        except ValueError:
            is_time = False
        if not is_time:
            raise ValueError("`time` is no time with a zone, such as 2026-11-21T23:00:00+00:00")
        shapes = {name: [len(rounds) for rounds in sets] for name, sets in self.samples.items()}
        for name in ("bucketed", "unbucketed", *shapes):
            if name not in shapes:
                raise ValueError(f"`samples` lacks {name!r}")
            if shapes[name] != shapes["bucketed"]:
                raise ValueError("`samples` has other rounds for one variant than for 'bucketed'")
        if _is_too_deep(self.workload):
            raise ValueError("`workload` is nested too deeply")

    @property
    def title(self) -> str:
        """The plan as people type it."""
        return self.plan if self.row is None else f"{self.plan}[{self.row}]"

    def seconds(self, variant: str) -> list[float]:
        """Seconds of every round of ``variant``, in the order in which they ran."""
        return [sample for rounds in self.samples[variant] for sample in rounds]

    def median_s(self, variant: str) -> float:
        """Median step of ``variant``, in seconds."""
        return median(self.seconds(variant))

    def ratios(self, variant: str = "bucketed") -> list[float]:
        """Step time of ``variant`` divided by that of the unbucketed one, round by round."""
        sets = zip(self.samples[variant], self.samples["unbucketed"], strict=True)
        return [ours / theirs for pair in sets for ours, theirs in zip(*pair, strict=True)]

    def bubble_text(self, variant: str) -> str:
        """``bubble 31.2 %, 27.3 % by the table of 1F1B, 20.0 % by (p - 1) / (m + p - 1)``; empty without stages."""
        if self.pipeline is None:
            return ""
        found = self.pipeline["bubble"].get(variant)
        measured = "bubble not measured" if found is None else f"bubble {found:.1%}"
        book = self.pipeline["bubble_by_book"]
        by_book = "" if book is None else f", {book:.1%} by (p - 1) / (m + p - 1)"
        return f"{measured}, {self.pipeline['bubble_of_table']:.1%} by the table of {self.pipeline['schedule']}{by_book}"

    def buckets(self, variant: str) -> Sequence[BucketTime]:
        """Launches of ``variant`` in order; empty if the record has no graph of it."""
        graph = self.graphs.get(variant)
        return graph["buckets"] if graph else ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON, with the format's number first."""
        plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(self)))  # tuples as the lists that are read back
        return plain

    @classmethod
    def from_dict(cls, data: object, where: str) -> Record:
        """Read the result of ``to_dict``. Raises BenchmarkError, beginning with ``where``, for another format or for damage."""
        # msgspec would refuse another tag, too, but without saying what to do.
        if isinstance(data, dict) and (type(data.get("format")) is not int or data["format"] != FORMAT):  # true equals 1
            raise BenchmarkError(
                f"{where}: the measurement has format {str(data.get('format'))[:60]} and this version reads {FORMAT}; compare "
                "with the pytest-fxbucket that wrote it, or measure again"
            )
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise BenchmarkError(
                f"{where}: the stored measurement is damaged: {error}; restore the file, or measure again"
            ) from None


def _is_too_deep(value: object, left: int = _DEEPEST) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_too_deep(each, left - 1) for each in inner)
