"""One step as a figure: a row for each rank and stream, a bar for each span; what is exposed stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.words import escaped, size, span_name
from pytest_fxbucket.bench.timeline.lanes import Row, rows_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.span import Span

_KINDS = {
    "forward": ("compute, forward", ("#6db1e1", "#5a9fd0")),
    "backward": ("compute, backward", ("#2f6db5", "#28609f")),
    "optimizer": ("compute, optimizer", ("#a77cc4", "#966bb4")),
    "copies": ("copies into and out of buckets", ("#e3b23c", "#d2a22f")),
    "launch": ("launch", ("#1b9e77", "#1b9e77")),
    "wait": ("wait: exposed", ("#e4322b", "#e4322b")),
    "flight": ("in flight", ("#9aa4ad", "#aab3bb")),
}
"""Name of each sort of span, and the two shades that neighbours have in turn; in the order of the legend."""
_ROW_PX, _FRAME_PX = 24, 96


def step_figure(spans: Sequence[Span], buckets: Sequence[Mapping[str, Any]], length_ms: float) -> dict[str, Any]:
    """plotly's figure of one step, plain data; ``buckets`` of the record tell bytes, ``length_ms`` is the axis's end.

    ``meta.length_ms`` of the layout is the end that this step alone needs.
    """
    rows = rows_of(spans)
    place = {row: number for number, row in enumerate(rows)}
    sorts: dict[str, list[tuple[Span, int]]] = {sort: [] for sort in _KINDS}
    for row, row_spans in rows.items():
        for span in row_spans:
            sorts[_sort(span)].append((span, place[row]))
    own_ms = round(1.01 * max((_ms(span.end_ns) for span in spans), default=0.0), 6)
    return {
        "data": [_bars(sort, found, buckets) for sort, found in sorts.items() if found],
        "layout": _layout(list(rows), length_ms, own_ms),
    }


def _sort(span: Span) -> str:
    if span.kind != "compute":
        return span.kind
    if span.label.startswith(("copy-in ", "copy-out ")):
        return "copies"
    return span.direction if span.direction in _KINDS else "forward"


def _bars(sort: str, found: Sequence[tuple[Span, int]], buckets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name, shades = _KINDS[sort]
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
        "hovertext": [_hover(span, buckets) for span, _ in found],
        "hoverinfo": "text",
    }
    if sort == "flight":
        bars |= {
            "text": [escaped(span.label) for span, _ in found],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "textfont": {"color": "#14181c"},
        }
    return bars


def _hover(span: Span, buckets: Sequence[Mapping[str, Any]]) -> str:
    what = span_name(span.label, span.direction) if span.kind == "compute" else span.label
    kind = {"wait": "wait: exposed", "flight": "in flight"}.get(span.kind, span.kind)
    took = f"{_ms(span.end_ns - span.start_ns):.3f} ms from {_ms(span.start_ns):.3f} ms on"
    lines = [f"<b>{escaped(what)}</b>", f"{kind}, {escaped(span.direction)}", took]
    if 0 <= span.bucket < len(buckets):
        lines.append(size(buckets[span.bucket]["bytes"]))
    return "<br>".join([*lines, f"rank {span.rank}, {escaped(span.stream)}"])


def _layout(rows: Sequence[Row], length_ms: float, own_ms: float) -> dict[str, Any]:
    borders = [number - 0.5 for number, row in enumerate(rows) if number and row[0] != rows[number - 1][0]]
    return {
        "barmode": "overlay",
        "meta": {"length_ms": own_ms},
        "height": _FRAME_PX + _ROW_PX * len(rows),
        "margin": {"l": 10, "r": 16, "t": 8, "b": 40},
        "hovermode": "closest",
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "xaxis": {"range": [0, length_ms], "title": {"text": "ms since the step began"}, "zeroline": False},
        "yaxis": {
            "range": [len(rows) - 0.5, -0.5],
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
    """The rank once, at its first row; of lanes that only make room no name."""
    rank, stream, lane = rows[number]
    is_first = number == 0 or rows[number - 1][0] != rank
    return (f"<b>rank {rank}</b>  " if is_first else "") + (escaped(stream) if lane == 1 else "")


def _ms(ns: int) -> float:
    return round(ns / 1e6, 6)
