"""Writes the report: a self-contained page for each plan, traces beside it, and an index of all pages."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.figures import MOST_RUNS, commit_text, machine_text, samples_figure, size, step_figure
from pytest_fxbucket.bench.stats import ms
from pytest_fxbucket.bench.store import comparable
from pytest_fxbucket.bench.timeline.spans import chrome_trace, drawn, to_json
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.files import write_whole

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record
    from pytest_fxbucket.bench.timeline.marks import Span

INDEX = "index"
_ASSETS = Path(__file__).with_name("assets")
_LONGEST_NAME = 120
_MOST_BUCKETS = 25


@dataclass(frozen=True, slots=True)
class ReportInput:
    """One plan's measurement, and all else that its page shows."""

    record: Record
    """The measurement of this run."""
    stored: Sequence[Record] = ()
    """Measurements of earlier runs of the plan, oldest first."""
    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """By variant one step of all ranks; if empty, the page says that there is no timeline. A variant that the record lacks,
    such as a simulated step, is shown only as that step, on a time axis of its own."""
    stages: Mapping[str, Any] | None = None
    """The picture of the plan's stages, from :func:`pytest_fxbucket.bench.report.stages.picture_of`; None without stages."""


def lacks_pictures() -> str:
    """Why no report can be written here, as a sentence; empty if one can."""
    lacking = [name for name in ("plotly", "jinja2") if find_spec(name) is None]
    if not lacking:
        return ""
    return f"a report needs {lacking[0]}, which is not installed; install it with pip install 'pytest-fxbucket[report]'"


def write_report(folder: Path, plans: Sequence[ReportInput]) -> list[Path]:
    """Write ``index.html``, and for each plan ``<plan>.html`` and ``<plan>.<variant>.trace.json``; the paths, index first.

    Each file is written whole or not at all, and equal input gives equal files. Other files in ``folder`` stay. Raises
    :class:`BenchmarkError` without plotly and jinja2, or if ``folder`` cannot be written to.
    """
    if problem := lacks_pictures():
        raise BenchmarkError(problem)
    names = file_names([one.record.title for one in plans], taken=[INDEX])
    machines = dict.fromkeys(machine_text(one.record.machine) for one in plans)
    pages = {
        f"{INDEX}.html": html_page("index.html", "Step time", plans=list(zip(names, plans, strict=True)), machines=machines)
    }
    files: dict[str, str] = {}
    for name, one in zip(names, plans, strict=True):
        variants = [variant for variant in one.spans if one.spans[variant]]
        traces = {variant: f"{name}.{part}.trace.json" for variant, part in zip(variants, file_names(variants), strict=True)}
        pages[f"{name}.html"] = plan_page(one, traces)
        files |= {file: _trace(one, variant) for variant, file in traces.items()}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in (pages | files).items():
            write_whole(folder / name, text)
    except OSError as error:
        raise BenchmarkError(f"the report cannot be written to {folder}: {error.strerror or error}") from error
    return [folder / name for name in pages | files]


def file_names(titles: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """A name for each title: path parts joined by dots, without ``.toml``; if two would be equal, both end in a digest."""
    plain = [_plain_name(title) for title in titles]
    # Compared in lower case, since some file systems do not tell the cases apart.
    lowered = [*(name.lower() for name in taken), *(name.lower() for name in plain)]
    found: list[str] = []
    for number, (title, name) in enumerate(zip(titles, plain, strict=True)):
        if lowered.count(name.lower()) > 1 or not name:
            digest = hashlib.sha256(title.encode()).hexdigest()[:8]
            again = titles[:number].count(title)  # equal titles have equal digests
            name = ".".join([*filter(None, [name, digest]), *([str(again + 1)] if again else [])])
        found.append(name)
    return found


def _plain_name(title: str) -> str:
    name = re.sub(r"\.toml(?=\[|$)", "", title.replace(os.sep, "/"))
    return re.sub(r"[^A-Za-z0-9_=+-]+", ".", name).strip(".")[:_LONGEST_NAME]


def _trace(given: ReportInput, variant: str) -> str:
    record = given.record
    about = {
        "plan": record.title,
        "variant": variant,
        "graphs": graphs["digest"] if (graphs := record.graphs.get(variant)) else "",
        "commit": commit_text(record),
        "machine": machine_text(record.machine),
        "torch": record.torch,
    }
    return to_json(chrome_trace(given.spans[variant], about))


def plan_page(given: ReportInput, traces: Mapping[str, str]) -> str:
    """HTML of one plan's page; ``traces``: by variant the name of the file beside it that holds the whole timeline."""
    record = given.record
    groups = grouped(record, given.stored)
    names = ["bucketed", "unbucketed"]
    names += [name for name in record.samples if name not in names]
    figures = {
        f"samples-{number}": samples_figure(runs.records[-MOST_RUNS:], is_newest_ours=number == 0)
        for number, runs in enumerate(groups)
    }
    ends = {variant: max(span.end_ns for span in spans) / 1e6 for variant, spans in given.spans.items() if spans}
    shown = [*(name for name in names if name in ends), *(variant for variant in ends if variant not in names)]
    length_ms = max((ends[variant] for variant in shown if variant in names), default=0.0)
    steps = []
    for number, variant in enumerate(shown):
        seen = drawn(given.spans[variant])
        is_measured = variant in names  # what is simulated has another machine's scale
        end_ms = length_ms if is_measured else ends[variant]
        buckets = record.buckets(variant if is_measured else "bucketed")
        figures[f"step-{number}"] = step_figure(seen.spans, buckets, round(end_ms * 1.01, 6))
        step = {"variant": variant, "left_out": seen.left_out, "trace": traces.get(variant), "is_measured": is_measured}
        steps.append(step)
    return html_page(
        "plan.html",
        f"{record.title} @ {commit_text(record)}",
        figures,
        record=record,
        variants=[_variant(record, name) for name in names],
        groups=groups,
        steps=steps,
        stages=given.stages,
        most_runs=MOST_RUNS,
        most_buckets=_MOST_BUCKETS,
    )


def _variant(record: Record, name: str) -> dict[str, Any]:
    """The values of one variant for the page; a dash for a value that was not measured."""
    graph = record.graphs.get(name)
    exposed = [one["exposed_s"] for one in record.buckets(name) if one["exposed_s"] is not None]
    return {
        "name": name,
        "step": ms(record.median_s(name)),
        "ratio": ratio_text(record, name),
        "exposed": ms(sum(exposed) if exposed else None),
        "launches": graph["launches"] if graph else "-",
        "bytes": size(graph["bytes"] if graph else None),
        "peak": size(max(graph["peak_bytes"], default=None) if graph else None),
        "buckets": sorted(record.buckets(name), key=lambda one: -(one["exposed_s"] or 0.0)),
    }


def ratio_text(record: Record, variant: str) -> str:
    """``81.2 %``: median over rounds of the step's time against the unbucketed one of the same round."""
    return f"{100 * median(record.ratios(variant)):.1f} %"


@dataclass(frozen=True, slots=True)
class ComparableRuns:
    """Runs that are comparable with each other."""

    differs: tuple[str, ...]
    """Clauses on how they differ from this run; empty for the group that is comparable with it."""
    records: tuple[Record, ...]
    """Oldest first."""


def grouped(record: Record, stored: Sequence[Record]) -> list[ComparableRuns]:
    """This run's group first, with ``record`` as its last, then the others in order of their newest run, latest first.

    Runs on another machine, of another step or of another pass stand apart.
    """
    groups: dict[str, list[Record]] = {}
    for one in stored:
        groups.setdefault(_kind(one), []).append(one)
    ours = [one for one in groups.pop(_kind(record), []) if one != record]
    others = sorted(groups.values(), key=lambda group: (group[-1].time, _kind(group[-1])), reverse=True)
    found = [ComparableRuns((), (*ours, record))]
    for group in others:
        passes = () if group[-1].pass_name == record.pass_name else (f"pass {group[-1].pass_name}",)
        found.append(ComparableRuns((*comparable(group[-1], record), *passes), tuple(group)))
    return found


def _kind(record: Record) -> str:
    """A key that is equal for runs that :func:`comparable` accepts and that are of one pass."""
    kind = (record.title, record.machine, record.backend, record.ranks, record.has_priority, record.workload, record.pass_name)
    return json.dumps(_said(kind), sort_keys=True)


def _said(value: Any) -> Any:
    """``value`` without keys that are null, which are as good as left out."""
    if isinstance(value, Mapping):
        return {key: _said(one) for key, one in value.items() if one is not None}
    return [_said(one) for one in value] if isinstance(value, (list, tuple)) else value


def html_page(template: str, title: str, figures: Mapping[str, Mapping[str, Any]] | None = None, **values: Any) -> str:
    """The page of ``template``, with ``figures`` by the id that the template names in ``data-figure``.

    A page with figures contains plotly.js, once. Its Content Security Policy (level 3) lets only the page's own two scripts
    run, by their digests, and lets nothing be loaded; styles and images are the page's own.
    """
    from jinja2 import Environment, FileSystemLoader

    scripts = []
    if figures:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # plotly says no types

        scripts = [get_plotlyjs(), (_ASSETS / "page.js").read_text(encoding="utf-8")]
    # The browser hashes all that stands between the tags: the template may add nothing to it, not even a line break.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # NaN is no JSON: better an error here than a page whose figures cannot be read.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.globals |= {
        "commit_text": commit_text,
        "machine_text": machine_text,
        "ms": ms,
        "ratio_text": ratio_text,
        "size": size,
    }
    return environment.get_template(template).render(
        title=title,
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        figures=figures or {},
        scripts=scripts,
        **values,
    )
