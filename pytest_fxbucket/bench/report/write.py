"""Writes the report: a page for each plan, traces beside it, and an index of all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from pytest_fxbucket.bench.report.html_page import html_page, table
from pytest_fxbucket.bench.report.inputs import ReportInput
from pytest_fxbucket.bench.report.page import median_s, plan_page, ratio_text
from pytest_fxbucket.bench.report.words import commit_text, escaped, machine_text, ms
from pytest_fxbucket.bench.timeline.chrome import chrome_trace, to_json
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.golden.disk import write_whole

__all__ = ["ReportInput", "lacks_pictures", "write_report"]

INDEX = "index"
_LONGEST = 120


def lacks_pictures() -> str:
    """Why no report can be written here, as a sentence; empty if one can."""
    if find_spec("plotly") is None:
        return "a report needs plotly, which is not installed; install it with pip install 'pytest-fxbucket[report]'"
    return ""


def write_report(folder: Path, plans: Sequence[ReportInput]) -> list[Path]:
    """Write ``index.html``, and of each plan ``<plan>.html`` and ``<plan>.<variant>.trace.json``; the paths, index first.

    Each file is there whole or not at all, and the same for equal input; others in ``folder`` stay. Raises
    :class:`BenchmarkError` without plotly, or if ``folder`` cannot be written to.
    """
    if problem := lacks_pictures():
        raise BenchmarkError(problem)
    names = file_names([one.record.title for one in plans], taken=[INDEX])
    pages = {INDEX: _index(plans, names)}
    files: dict[str, str] = {}
    for name, one in zip(names, plans, strict=True):
        variants = [variant for variant in one.spans if one.spans[variant]]
        traces = {variant: f"{name}.{part}.trace.json" for variant, part in zip(variants, file_names(variants), strict=True)}
        pages[name] = plan_page(one, traces)
        files |= {file: _trace(one, variant) for variant, file in traces.items()}
    files = {f"{name}.html": page for name, page in pages.items()} | files
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise BenchmarkError(f"the report cannot be written to {folder}: {error.strerror or error}") from error
    return [folder / name for name in files]


def file_names(titles: Sequence[str], taken: Iterable[str] = ()) -> list[str]:
    """A name for each title: path parts joined by dots, without ``.toml``; where two would meet, both end in a digest."""
    plain = [_plain_name(title) for title in titles]
    lowered = [*(name.lower() for name in taken), *(name.lower() for name in plain)]
    found: list[str] = []
    for number, (title, name) in enumerate(zip(titles, plain, strict=True)):
        if lowered.count(name.lower()) > 1 or not name:
            digest = hashlib.sha256(title.encode()).hexdigest()[:8]
            again = titles[:number].count(title)
            name = ".".join([*filter(None, [name, digest]), *([str(again + 1)] if again else [])])
        found.append(name)
    return found


def _plain_name(title: str) -> str:
    name = re.sub(r"\.toml(?=\[|$)", "", title.replace(os.sep, "/"))
    return re.sub(r"[^A-Za-z0-9_=+-]+", ".", name).strip(".")[:_LONGEST]


def _trace(given: ReportInput, variant: str) -> str:
    record = given.record
    about = {
        "plan": record.title,
        "variant": variant,
        "commit": commit_text(record),
        "machine": machine_text(record.machine),
        "torch": record.torch,
    }
    return to_json(chrome_trace(given.spans[variant], about))


def _index(plans: Sequence[ReportInput], names: Sequence[str]) -> str:
    rows = [
        [
            f'<a href="{escaped(name)}.html">{escaped(one.record.title)}</a>',
            f"<code>{escaped(commit_text(one.record))}</code>",
            ms(median_s(one.record, "bucketed")),
            ms(median_s(one.record, "unbucketed")),
            ratio_text(one.record, "bucketed"),
            str(len(one.stored)),
        ]
        for name, one in zip(names, plans, strict=True)
    ]
    head = ["plan", "commit", "bucketed step, median", "unbucketed", "of unbucketed", "stored runs"]
    machines = dict.fromkeys(machine_text(one.record.machine) for one in plans)
    body = table(head, rows) if rows else '<p class="soft">No plan was measured in this run.</p>'
    return html_page(
        "Step time",
        [
            f'<header><h1>Step time</h1><p class="soft">{escaped("; ".join(machines))}</p></header>',
            f'<section class="card">{body}</section>',
        ],
    )
