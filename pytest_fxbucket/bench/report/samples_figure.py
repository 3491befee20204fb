"""Samples by commit as a figure: step time of both variants above, their ratio below, a column for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.report.evenly import jitter, picked
from pytest_fxbucket.bench.report.words import commit_text, escaped

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record

MOST_RUNS = 40
"""Runs in one figure, the latest ones."""
MOST_POINTS = 120
"""Samples of a run and variant that are drawn as points; boxes are of all."""
_COLOURS = {"unbucketed": "#8a949e", "bucketed": "#2f6db5", "ratio": "#1b9e77"}
_OFFSET, _WIDTH = {"unbucketed": -0.18, "bucketed": 0.18, "ratio": 0.0}, 0.3


def samples_figure(runs: Sequence[Record], is_newest_ours: bool) -> dict[str, Any]:
    """plotly's figure of ``runs``, oldest first, plain data; ``is_newest_ours``: the last is this run's."""
    traces = []
    for variant in ("unbucketed", "bucketed"):
        columns = [[sample * 1e3 for rounds in run.samples[variant] for sample in rounds] for run in runs]
        traces += _column_traces(variant, columns, runs, "y", "ms")
    ratios = [[100 * ratio for ratio in _ratios(run)] for run in runs]
    traces += _column_traces("ratio", ratios, runs, "y2", "%")
    names = [_run_name(run, is_newest_ours and number == len(runs) - 1) for number, run in enumerate(runs)]
    return {"data": traces, "layout": _layout(names, *(_seen(traces, axis) for axis in ("y", "y2")))}


def _ratios(run: Record) -> list[float]:
    """Bucketed over unbucketed, of each round."""
    pairs = zip(run.samples["bucketed"], run.samples["unbucketed"], strict=True)
    return [ours / theirs for rounds in pairs for ours, theirs in zip(*rounds, strict=True)]


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
        "hovertext": [_hover(name, column, run, unit) for column, run in zip(columns, runs, strict=True)],
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


def _run_name(run: Record, is_ours: bool) -> str:
    return ("<b>this run</b><br>" if is_ours else "") + escaped(commit_text(run)).replace(" dirty", "<br>dirty")


def _hover(name: str, column: Sequence[float], run: Record, unit: str) -> str:
    what = "bucketed / unbucketed" if name == "ratio" else name
    sha = run.commit or "no commit"
    lines = [
        f"<b>{what}: {median(column):.3f} {unit}</b> (median of {len(column)} steps)",
        escaped(sha) + (", dirty work tree" if run.dirty else ""),
        f"{escaped(run.time)}, torch {escaped(run.torch)}",
    ]
    return "<br>".join(lines if run.is_stable else [*lines, "step time had not settled"])


def _seen(traces: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    """Ends of ``axis``: its boxes with their fences, since one outlier would press all of them flat."""
    boxes = [trace for trace in traces if trace["type"] == "box" and trace["yaxis"] == axis]
    low = min(value for box in boxes for value in box["lowerfence"])
    high = max(value for box in boxes for value in box["upperfence"])
    room = 0.06 * (high - low) or 0.01 * high
    return [_rounded(low - room), _rounded(high + room)]


def _layout(names: Sequence[str], times: list[float], ratios: list[float]) -> dict[str, Any]:
    last = len(names) - 1
    axis = {"zeroline": False, "automargin": True}
    return {
        "height": 520,
        "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "xaxis": {
            **axis,
            "range": [-0.6, max(last, 2) + 0.6],
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
