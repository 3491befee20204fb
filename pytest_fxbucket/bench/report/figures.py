"""Figures for plotly, as plain data: samples by commit, and one step; and texts that figures and pages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.timeline.spans import COPIES, Row, jitter, rows_of
from pytest_fxbucket.words import counted, human_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import BucketTime, MachineKind, Record
    from pytest_fxbucket.bench.timeline.marks import Span


MOST_RUNS = 40
"""Runs in one figure, the latest ones."""
MOST_POINTS = 120
"""How many samples of a run and variant are drawn as points; boxes are made from all samples."""
_COLOURS = {"unbucketed": "#8a949e", "bucketed": "#2f6db5", "ratio": "#1b9e77"}
_OFFSET, _WIDTH = {"unbucketed": -0.18, "bucketed": 0.18, "ratio": 0.0}, 0.3


_SORTS = {
    "forward": ("compute, forward", ("#6db1e1", "#5a9fd0")),
    "backward": ("compute, backward", ("#2f6db5", "#28609f")),
    "optimizer": ("compute, optimizer", ("#a77cc4", "#966bb4")),
    "copies": ("copies into and out of buckets", ("#e3b23c", "#d2a22f")),
    "launch": ("launch", ("#1b9e77", "#1b9e77")),
    "wait": ("wait: exposed", ("#e4322b", "#e4322b")),
    "flight": ("in flight", ("#9aa4ad", "#aab3bb")),
}
"""By sort of span its name in the legend, and two shades, which neighbours take in turn; in the order of the legend."""
_ROW_PX, _FRAME_PX = 24, 96


def samples_figure(runs: Sequence[Record], is_newest_ours: bool) -> dict[str, Any]:
    """The figure of the samples of ``runs``, oldest first; ``is_newest_ours``: the last one is this run."""
    traces = []
    for variant in ("unbucketed", "bucketed"):
        columns = [[sample * 1e3 for sample in run.seconds(variant)] for run in runs]
        traces += _column_traces(variant, columns, runs, "y", "ms")
    ratios = [[100 * ratio for ratio in run.ratios()] for run in runs]
    traces += _column_traces("ratio", ratios, runs, "y2", "%")
    names = [escape(commit_text(run)).replace(" dirty", "<br>dirty") for run in runs]
    if is_newest_ours:
        names[-1] = f"<b>this run</b><br>{names[-1]}"
    return {"data": traces, "layout": _samples_layout(names, *(_axis_range(traces, axis) for axis in ("y", "y2")))}


def _column_traces(
    name: str, columns: Sequence[Sequence[float]], runs: Sequence[Record], axis: str, unit: str
) -> list[dict[str, Any]]:
    """A box of each column, and some of its samples as points."""
    shared = {"name": "bucketed / unbucketed" if name == "ratio" else name, "legendgroup": name, "yaxis": axis}
    places = [number + _OFFSET[name] for number in range(len(columns))]
    few = [picked(column, MOST_POINTS) for column in columns]
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [place + _WIDTH * 0.7 * jitter(i) for place, column in zip(places, few, strict=True) for i in range(len(column))],
        "y": [_rounded(value) for column in few for value in column],
        "marker": {"color": _COLOURS[name], "size": 3, "opacity": 0.3},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    boxes = {
        "type": "box",
        "x": places,
        **_five([sorted(column) for column in columns]),
        "width": _WIDTH,
        "line": {"color": _COLOURS[name], "width": 1.5},
        "fillcolor": "rgba(0,0,0,0)",
        "hoverinfo": "skip",
    }
    middles = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": places,
        "y": [_rounded(median(column)) for column in columns],
        "line": {"color": _COLOURS[name], "width": 1, "dash": "dot"},
        "marker": {"color": _COLOURS[name], "size": 7, "symbol": "diamond"},
        "hovertext": [_samples_hover(name, column, run, unit) for column, run in zip(columns, runs, strict=True)],
        "hoverinfo": "text",
        "showlegend": False,
    }
    return [shared | points, shared | boxes, shared | middles]


def _five(columns: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Quartiles, and fences at the outermost samples within 1.5 times their distance (Tukey's box plot)."""
    quarters = [quantiles(column, n=4, method="inclusive") if len(column) > 1 else [column[0]] * 3 for column in columns]
    low = [min(v for v in column if v >= q[0] - 1.5 * (q[2] - q[0])) for column, q in zip(columns, quarters, strict=True)]
    high = [max(v for v in column if v <= q[2] + 1.5 * (q[2] - q[0])) for column, q in zip(columns, quarters, strict=True)]
    found = {"q1": [q[0] for q in quarters], "median": [q[1] for q in quarters], "q3": [q[2] for q in quarters]}
    found |= {"lowerfence": low, "upperfence": high}
    return {key: [_rounded(value) for value in values] for key, values in found.items()}


def _samples_hover(name: str, column: Sequence[float], run: Record, unit: str) -> str:
    what = "bucketed / unbucketed" if name == "ratio" else name
    sha = run.commit or "no commit"
    lines = [
        f"<b>{what}: {median(column):.3f} {unit}</b> (median of {len(column)} steps)",
        escape(sha) + (", dirty work tree" if run.dirty else ""),
        f"{escape(run.time)}, torch {escape(run.torch)}",
    ]
    return "<br>".join(lines if run.is_stable else [*lines, "step time had not settled"])


def _axis_range(traces: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    """The range of ``axis``: that of its boxes with their fences, since a range for all outliers would press the boxes flat."""
    boxes = [trace for trace in traces if trace["type"] == "box" and trace["yaxis"] == axis]
    low = min(value for box in boxes for value in box["lowerfence"])
    high = max(value for box in boxes for value in box["upperfence"])
    room = 0.06 * (high - low) or 0.01 * high  # the second if all are equal
    return [_rounded(low - room), _rounded(high + room)]


def _samples_layout(names: Sequence[str], times: list[float], ratios: list[float]) -> dict[str, Any]:
    last = len(names) - 1
    axis = {"zeroline": False, "automargin": True}
    return {
        "height": 520,
        "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "xaxis": {
            **axis,
            "range": [-0.6, max(last, 2) + 0.6],  # room for three, since a box alone would fill the figure
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": list(names),
            "tickangle": 0 if len(names) <= 12 else 90,
            "anchor": "y2",
            "showgrid": False,
        },
        "yaxis": {**axis, "domain": [0.42, 1], "title": {"text": "step, ms"}, "range": times},
        "yaxis2": {**axis, "domain": [0, 0.34], "title": {"text": "of unbucketed, %"}, "range": ratios},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def step_figure(spans: Sequence[Span], buckets: Sequence[BucketTime], length_ms: float) -> dict[str, Any]:
    """The figure of one step; ``buckets`` of the record give bytes, ``length_ms`` is the end of the time axis.

    ``meta.length_ms`` of the layout is the end that an axis for this step alone would have.
    """
    rows = rows_of(spans)
    place = {row: number for number, row in enumerate(rows)}
    sorts: dict[str, list[tuple[Span, int]]] = {sort: [] for sort in _SORTS}
    for row, row_spans in rows.items():
        for span in row_spans:
            sorts[_sort(span)].append((span, place[row]))
    own_ms = round(1.01 * max((_ms(span.end_ns) for span in spans), default=0.0), 6)
    return {
        "data": [_bars(sort, found, buckets) for sort, found in sorts.items() if found],
        "layout": _step_layout(list(rows), length_ms, own_ms),
    }


def _sort(span: Span) -> str:
    if span.kind != "compute":
        return span.kind
    if span.label.startswith(COPIES):
        return "copies"
    return span.direction if span.direction in _SORTS else "forward"


def _bars(sort: str, found: Sequence[tuple[Span, int]], buckets: Sequence[BucketTime]) -> dict[str, Any]:
    name, shades = _SORTS[sort]
    colours: Any = [shades[number % 2] for number in range(len(found))] if shades[0] != shades[1] else shades[0]
    bars: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [place for _, place in found],
        "base": [_ms(span.start_ns) for span, _ in found],
        "x": [_ms(span.end_ns - span.start_ns) for span, _ in found],
        "width": 0.84,
        "marker": {"color": colours, "line": {"width": 0}},
        "hovertext": [_span_hover(span, buckets) for span, _ in found],
        "hoverinfo": "text",
    }
    if sort == "flight":
        bars |= {
            "text": [escape(span.label) for span, _ in found],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": "#14181c"},
        }
    return bars


def _span_hover(span: Span, buckets: Sequence[BucketTime]) -> str:
    elsewhere = "the optimizer" if span.direction == "optimizer" else "outside of any module"
    what = span.label or elsewhere if span.kind == "compute" else span.label
    kind = {"wait": "wait: exposed", "flight": "in flight"}.get(span.kind, span.kind)
    took = f"{_ms(span.end_ns - span.start_ns):.3f} ms from {_ms(span.start_ns):.3f} ms on"
    lines = [f"<b>{escape(what)}</b>", f"{kind}, {escape(span.direction)}", took]
    if 0 <= span.bucket < len(buckets):
        lines.append(size(buckets[span.bucket]["bytes"]))
    return "<br>".join([*lines, f"rank {span.rank}, {escape(span.stream)}"])


def _step_layout(rows: Sequence[Row], length_ms: float, own_ms: float) -> dict[str, Any]:
    borders = [number - 0.5 for number, row in enumerate(rows) if number and row[0] != rows[number - 1][0]]
    return {
        "barmode": "overlay",  # each bar has its own base, and none is put on others
        "meta": {"length_ms": own_ms},
        "height": _FRAME_PX + _ROW_PX * len(rows),
        "margin": {"l": 10, "r": 16, "t": 8, "b": 40},
        "hovermode": "closest",
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "xaxis": {"range": [0, length_ms], "title": {"text": "ms since the step began"}, "zeroline": False},
        "yaxis": {
            "range": [len(rows) - 0.5, -0.5],  # downwards: the first row is on top
            "tickmode": "array",
            "tickvals": list(range(len(rows))),
            "ticktext": [_row_name(rows, number) for number in range(len(rows))],
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"width": 1, "color": "#8a949e"}}
            for y in borders
        ],
    }


def _row_name(rows: Sequence[Row], number: int) -> str:
    """A row's label: the rank at its first row only, and the stream at its first lane only."""
    rank, stream, lane = rows[number]
    is_first = number == 0 or rows[number - 1][0] != rank
    return (f"<b>rank {rank}</b>  " if is_first else "") + (escape(stream) if lane == 1 else "")


def _ms(ns: int) -> float:
    return round(ns / 1e6, 6)


def picked(column: Sequence[float], most: int) -> list[float]:
    """At most ``most`` values of ``column``, spread evenly over its length."""
    if len(column) <= most:
        return list(column)
    return [column[number * len(column) // most] for number in range(most)]


def size(count: float | None) -> str:
    """``1.5 MiB``; a dash for None."""
    return "-" if count is None else human_bytes(count)


def commit_text(record: Record) -> str:
    """``1a2b3c4d5``, ``1a2b3c4d5 dirty``, ``no commit``."""
    return (record.commit[:9] if record.commit else "no commit") + (" dirty" if record.dirty else "")


def machine_text(machine: MachineKind) -> str:
    """``AMD EPYC 9B14, 2 cores, x86_64 Linux``, with equal GPUs counted in front."""
    gpus = [f"{machine['gpus'].count(gpu)} x {gpu}" for gpu in dict.fromkeys(machine["gpus"])]
    cores = counted(machine["cores"], "core")
    return ", ".join([*gpus, machine["cpu"], cores, f"{machine['arch']} {machine['system']}"])
