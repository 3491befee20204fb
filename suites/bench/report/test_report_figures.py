"""Figures are what plotly takes, and show what was measured: every span, quartiles of all samples, the ratio round by round."""

from __future__ import annotations

from statistics import median
from typing import Any

import plotly.graph_objects
import pytest
import torch

from pytest_fxbucket.bench.report.figures import (
    MOST_POINTS,
    machine_text,
    picked,
    samples_figure,
    size,
    step_figure,
)
from pytest_fxbucket.bench.stats import ms
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.spans import drawn, jitter, merged
from suites.bench.records import bucket, record
from suites.bench.report.pages import history, step

BUCKETS = [bucket("all_gather layers.0"), bucket("all_gather layers.1")]


def bars(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (trace for trace in figure["data"] if trace["name"] == name)
    return dict(found)


class TestStep:
    def test_plotly_takes_it(self) -> None:
        plotly.graph_objects.Figure(step_figure(step(3), BUCKETS, 30.0))

    def test_every_span_is_a_bar_at_its_time_in_its_ranks_row(self) -> None:
        spans = step(2)
        figure = step_figure(spans, BUCKETS, 30.0)
        found = [
            (y, base, x) for trace in figure["data"] for y, base, x in zip(trace["y"], trace["base"], trace["x"], strict=True)
        ]
        rows = {(0, "compute"): 0, (0, "communication"): 1, (1, "compute"): 2, (1, "communication"): 3}
        wanted = [(rows[s.rank, s.stream], s.start_ns / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in spans]
        assert sorted(found) == [pytest.approx(one) for one in sorted(wanted)]
        names = figure["layout"]["yaxis"]["ticktext"]
        assert names == ["<b>rank 0</b>  compute", "communication", "<b>rank 1</b>  compute", "communication"]

    def test_what_is_exposed_has_a_colour_of_its_own(self) -> None:
        figure = step_figure(step(1), BUCKETS, 30.0)
        exposed = bars(figure, "wait: exposed")
        assert len(exposed["x"]) == 2
        others = [trace["marker"]["color"] for trace in figure["data"] if trace["name"] != "wait: exposed"]
        assert all(exposed["marker"]["color"] not in colour for colour in others)

    def test_hovering_says_entry_bytes_time_and_rank(self) -> None:
        figure = step_figure(step(2), BUCKETS, 30.0)
        text = bars(figure, "wait: exposed")["hovertext"][0]
        assert text == (
            "<b>all_gather layers.0</b><br>wait: exposed, forward<br>3.000 ms from 6.000 ms on<br>4.0 KiB<br>rank 0, compute"
        )
        assert bars(figure, "compute, backward")["hovertext"][1].startswith("<b>outside of any module</b><br>compute")

    def test_packing_is_not_taken_for_the_models_compute(self) -> None:
        assert len(bars(step_figure(step(1), BUCKETS, 30.0), "copies into and out of buckets")["x"]) == 2


class TestSamples:
    RUNS = (*history(3), record(0.02, 0.01))

    def test_plotly_takes_it(self) -> None:
        plotly.graph_objects.Figure(samples_figure(self.RUNS, is_newest_ours=True))

    def test_boxes_are_quartiles_of_all_samples_in_ms(self) -> None:
        (box,) = (t for t in samples_figure(self.RUNS, True)["data"] if t["type"] == "box" and t["name"] == "bucketed")
        for number, run in enumerate(self.RUNS):
            every = sorted(1e3 * sample for rounds in run.samples["bucketed"] for sample in rounds)
            assert box["median"][number] == pytest.approx(median(every), rel=1e-5)
            quartiles = torch.tensor(every, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
            assert [box["q1"][number], box["q3"][number]] == pytest.approx(quartiles.tolist(), rel=1e-5)
            assert box["lowerfence"][number] >= every[0] * (1 - 1e-5)
            assert box["upperfence"][number] <= every[-1] * (1 + 1e-5)

    def test_an_outlier_does_not_press_the_boxes_flat(self) -> None:
        """A machine that stood still for a second is no reason to see nothing of all other steps."""
        samples = {"bucketed": [[1.0, 1.1, 1.2, 1.3, 90.0]], "unbucketed": [[2.0, 2.1, 2.2, 2.3, 2.4]]}
        figure = samples_figure([record(samples=samples)], True)
        low, high = figure["layout"]["yaxis"]["range"]
        assert low < 1000.0
        assert 2400.0 < high < 2600.0

    def test_the_ratio_is_that_of_each_round(self) -> None:
        """Not of the medians: rounds that a busy machine slowed have both variants slow."""
        run = record(samples={"bucketed": [[1.0, 20.0, 4.0]], "unbucketed": [[2.0, 10.0, 5.0]]})
        (box,) = (t for t in samples_figure([run], True)["data"] if t["type"] == "box" and t["name"] == "bucketed / unbucketed")
        assert (box["lowerfence"], box["median"], box["upperfence"]) == ([50.0], [80.0], [200.0])

    def test_points_are_at_most_so_many_and_spread_over_the_run(self) -> None:
        column = [float(number) for number in range(1000)]
        few = picked(column, MOST_POINTS)
        assert len(few) == MOST_POINTS
        assert few == sorted(few)
        assert few[0] < 10
        assert few[-1] > 980
        assert picked(column[:5], MOST_POINTS) == column[:5]
        assert all(-0.5 <= jitter(number) <= 0.5 for number in range(1000))

    def test_a_run_of_one_sample_has_a_box(self) -> None:
        run = record(samples={"bucketed": [[1.0]], "unbucketed": [[2.0]]})
        plotly.graph_objects.Figure(samples_figure([run], True))


class TestCoarse:
    def test_little_is_drawn_as_it_is(self) -> None:
        assert drawn(step(4)).spans == step(4)
        assert drawn(step(4)).left_out == ()

    def test_of_many_ranks_the_slowest_is_among_those_drawn(self) -> None:
        late = Span(7, "compute", "compute", "layers.0", "forward", 0, 10**10)
        seen = drawn([*step(12), late], most_ranks=3)
        assert {span.rank for span in seen.spans} == {0, 1, 7}
        assert seen.left_out == ("3 of 12 ranks are drawn, among them rank 7, which ends last",)

    def test_modules_are_cut_until_few_enough_spans_are_left(self) -> None:
        spans = [Span(0, "compute", "compute", f"layers.{i // 10}.part{i % 10}.w", "forward", i, i + 1) for i in range(100)]
        seen = drawn(spans, most_spans=20)
        assert [(span.label, span.start_ns, span.end_ns) for span in seen.spans] == [
            (f"layers.{i}", 10 * i, 10 * i + 10) for i in range(10)
        ]
        assert seen.left_out == ("compute is drawn by modules of 2 names at most",)

    def test_then_fewer_ranks_and_at_last_the_longest_spans_alone_are_drawn(self) -> None:
        spans = [
            Span(rank, "compute", "wait", "all_gather a", "forward", 100 * i, 100 * i + i + rank, i)
            for rank in range(4)
            for i in range(50)
        ]
        assert {span.rank for span in drawn(spans, most_spans=150).spans} == {0, 1, 3}
        short = [Span(3, "compute", "compute", "a", "forward", at, at + 90, -1) for at in range(6000, 9000, 100)]
        seen = drawn([*spans, *short], most_spans=60)
        assert {span.rank for span in seen.spans} == {3}
        assert sum(span.kind == "wait" for span in seen.spans) == 50
        assert seen.left_out == (
            "1 of 4 ranks are drawn, among them rank 3, which ends last",
            "20 of the shortest spans are not drawn",
        )
        at = [span.start_ns for span in seen.spans if span.kind == "compute"]
        assert min(at) < 7000 < 8000 < max(at)

    def test_communication_and_gaps_part_what_is_merged(self) -> None:
        def compute(start: int, end: int) -> Span:
            return Span(0, "compute", "compute", "a.b", "forward", start, end)

        wait = Span(0, "compute", "wait", "all_gather a", "forward", 2, 3, 0)
        spans = [compute(0, 1), compute(1, 2), wait, compute(3, 4), compute(5, 6)]
        assert [(span.kind, span.start_ns, span.end_ns) for span in merged(spans, 1)] == [
            ("compute", 0, 2), ("wait", 2, 3), ("compute", 3, 4), ("compute", 5, 6),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 51, "2048.0 TiB"), (None, "-")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


def test_times_and_machines() -> None:
    assert (ms(0.0012345), ms(12.0), ms(None)) == ("1.234 ms", "12,000.000 ms", "-")
    machine = {"system": "Linux", "arch": "x86_64", "cpu": "AMD", "cores": 1, "gpus": ["H200", "H200"]}
    assert machine_text(machine) == "2 x H200, AMD, 1 core, x86_64 Linux"
