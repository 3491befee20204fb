"""The page of one plan: headline figures, samples by commit, one step of each variant, buckets by exposed time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.coarse import drawn
from pytest_fxbucket.bench.report.html_page import figure_place, html_page, table
from pytest_fxbucket.bench.report.runs import grouped
from pytest_fxbucket.bench.report.samples_figure import MOST_RUNS, samples_figure
from pytest_fxbucket.bench.report.step_figure import step_figure
from pytest_fxbucket.bench.report.words import NOTHING, commit_text, escaped, machine_text, ms, size

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record
    from pytest_fxbucket.bench.report.inputs import ReportInput

_MOST_BUCKETS = 25


def plan_page(given: ReportInput, traces: Mapping[str, str]) -> str:
    """HTML of one plan's page; ``traces``: by variant the name of the file beside it that holds the whole timeline."""
    figures: dict[str, dict[str, Any]] = {}
    parts = [
        *_header(given.record),
        *_tiles(given.record),
        *_variants(given.record),
        *_samples(given, figures),
        *_steps(given, traces, figures),
        *_buckets(given.record),
    ]
    return html_page(f"{given.record.title} @ {commit_text(given.record)}", parts, figures)


def variants_of(record: Record) -> list[str]:
    """Bucketed and unbucketed first, then passes that ran beside them."""
    first = ["bucketed", "unbucketed"]
    return [*first, *(name for name in record.samples if name not in first)]


def median_s(record: Record, variant: str) -> float:
    """Median step of ``variant`` in seconds."""
    return median(sample for rounds in record.samples[variant] for sample in rounds)


def ratio_text(record: Record, variant: str) -> str:
    """``81.2 %``: median over rounds of the step's time against the unbucketed one of the same round."""
    pairs = zip(record.samples[variant], record.samples["unbucketed"], strict=True)
    return f"{100 * median(a / b for rounds in pairs for a, b in zip(*rounds, strict=True)):.1f} %"


def _header(record: Record) -> Iterator[str]:
    yield f"<header><h1>{escaped(record.title)}</h1>"
    commit = f"commit <code>{escaped(record.commit[:12])}</code>" if record.commit else "no commit"
    badges = ['<span class="badge">dirty work tree</span>'] if record.dirty else []
    badges += [] if record.is_stable else ['<span class="badge">step time had not settled</span>']
    yield f"<p>{' '.join([commit, *badges])}</p>"
    how = f"{record.ranks} ranks over {record.backend}, pass {record.pass_name}"
    yield f'<p class="soft">{escaped(machine_text(record.machine))}<br>{escaped(how)}, torch {escaped(record.torch)}, '
    yield f"Python {escaped(record.python)}, measured {escaped(record.time)}</p></header>"


def _tiles(record: Record) -> Iterator[str]:
    exposed = {variant: _exposed_s(record, variant) for variant in ("bucketed", "unbucketed")}
    graphs = record.graphs
    tiles = [
        ("", "bucketed step, median", ms(median_s(record, "bucketed")), f"unbucketed {ms(median_s(record, 'unbucketed'))}"),
        ("", "bucketed against unbucketed", ratio_text(record, "bucketed"), "of its time, round by round"),
        (
            " hot",
            "exposed, bucketed",
            ms(exposed["bucketed"]),
            f"unbucketed {ms(exposed['unbucketed'])}; all waits, each on its slowest rank",
        ),
        ("", "launches", _of(graphs, "bucketed", "launches"), f"unbucketed {_of(graphs, 'unbucketed', 'launches')}"),
    ]
    yield '<div class="tiles">'
    for kind, name, value, below in tiles:
        text = f'<span class="soft">{escaped(below)}</span>'
        yield f'<div class="tile{kind}"><span class="soft">{escaped(name)}</span><b>{escaped(value)}</b>{text}</div>'
    yield "</div>"


def _of(graphs: Mapping[str, Mapping[str, Any]], variant: str, what: str) -> str:
    return str(graphs.get(variant, {}).get(what, NOTHING))


def _exposed_s(record: Record, variant: str) -> float | None:
    """Sum over buckets; None if none was measured."""
    found = [one["exposed_s"] for one in _buckets_of(record, variant) if one["exposed_s"] is not None]
    return sum(found) if found else None


def _buckets_of(record: Record, variant: str) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = record.graphs.get(variant, {}).get("buckets", ())
    return found


def _variants(record: Record) -> Iterator[str]:
    rows = []
    for variant in variants_of(record):
        graph = record.graphs.get(variant, {})
        rows.append(
            [
                escaped(variant),
                ms(median_s(record, variant)),
                ratio_text(record, variant),
                ms(_exposed_s(record, variant)),
                _of(record.graphs, variant, "launches"),
                size(graph.get("bytes")),
                size(max(graph.get("peak_bytes") or (), default=None)),
            ]
        )
    head = ["variant", "step, median", "of unbucketed", "exposed", "launches", "bytes launched", "peak memory, largest rank"]
    rounds = [len(each) for each in record.samples["bucketed"]]
    yield '<section class="card"><h2>Variants</h2>' + table(head, rows)
    yield f'<p class="soft">{sum(rounds)} rounds in {len(rounds)} sets of processes, after '
    yield f"{escaped(', '.join(map(str, record.warmup_rounds)))} rounds of warm-up; a sample is the slowest rank's step. "
    yield f"Capture took {record.capture_s:.2f} s, the pass {record.pass_s:.2f} s.</p></section>"


def _samples(given: ReportInput, figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield '<section class="card"><h2>Samples by commit</h2>'
    yield '<p class="soft">Boxes are quartiles, diamonds medians, of all samples; points are some of them. '
    yield "Outliers beyond the fences are out of view until a double click. Machines differ in speed from day to day, so the "
    yield "ratio below says more than the times above.</p>"
    for number, runs in enumerate(grouped(given.record, given.stored)):
        name = f"samples-{number}"
        if runs.differs:
            yield f"<h3>Not comparable with this run: {escaped('; '.join(runs.differs))}</h3>"
        if len(runs.records) > MOST_RUNS:
            yield f'<p class="soft">The latest {MOST_RUNS} of {len(runs.records)} runs.</p>'
        figures[name] = samples_figure(runs.records[-MOST_RUNS:], is_newest_ours=not runs.differs)
        yield figure_place(name)
    yield "</section>"


def _steps(given: ReportInput, traces: Mapping[str, str], figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield '<section class="card"><h2>One step</h2>'
    shown = [variant for variant in variants_of(given.record) if given.spans.get(variant)]
    if not shown:
        yield '<p class="soft">No timeline was taken.</p></section>'
        return
    yield '<p class="soft">The median one of the steps that were traced. What is red blocks its rank: communication that no '
    yield "compute hides. Drag to zoom, double-click to see all; what is shown has one scale.</p>"
    yield '<div class="switch">'
    for variant in shown:
        yield f'<label><input type="checkbox" value="{escaped(variant)}" checked>{escaped(variant)}</label>'
    yield "</div>"
    length_ms = max(span.end_ns for variant in shown for span in given.spans[variant]) / 1e6
    for number, variant in enumerate(shown):
        seen = drawn(given.spans[variant])
        name = f"step-{number}"
        figures[name] = step_figure(seen.spans, _buckets_of(given.record, variant), round(length_ms * 1.01, 6))
        yield f'<div data-variant="{escaped(variant)}"><h3>{escaped(variant)}</h3>{figure_place(name, is_linked=True)}'
        trace = traces.get(variant)
        notes = [*seen.left_out, *([f'all of it: <a href="{escaped(trace)}">{escaped(trace)}</a>'] if trace else [])]
        yield f'<p class="soft">{"; ".join(notes)}{" (for ui.perfetto.dev or chrome://tracing)" if trace else ""}</p></div>'
    yield "</section>"


def _buckets(record: Record) -> Iterator[str]:
    yield '<section class="card"><h2>Buckets by exposed time</h2><div class="pair">'
    for variant in variants_of(record):
        buckets = sorted(_buckets_of(record, variant), key=lambda one: -(one["exposed_s"] or 0.0))
        if buckets:
            yield f'<div data-variant="{escaped(variant)}"><h3>{escaped(variant)}</h3>{_bucket_table(buckets)}</div>'
    yield "</div></section>"


def _bucket_table(buckets: Sequence[Mapping[str, Any]]) -> str:
    longest = max((one["exposed_s"] or 0.0 for one in buckets), default=0.0) or 1.0
    rows = []
    for one in buckets[:_MOST_BUCKETS]:
        share = 100 * (one["exposed_s"] or 0.0) / longest
        bar = f'<td class="bar"><i style="width:{share:.1f}%"></i></td>'
        cells = [escaped(one["label"]), escaped(one["direction"]), size(one["bytes"]), ms(one["in_flight_s"])]
        rows.append([*cells, ms(one["exposed_s"]), bar])
    more = len(buckets) - len(rows)
    rest = f'<p class="soft">and {more} more, each less exposed</p>' if more else ""
    return table(["bucket", "direction", "bytes", "launch to wait", "exposed", ""], rows) + rest
