"""What is written: names without clash, equal bytes for equal input, one plotly.js, nothing from elsewhere, text as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.report.page import ReportInput, file_names, grouped, html_page, write_report
from pytest_fxbucket.errors import BenchmarkError
from suites.bench.records import WORKLOAD, bucket, fields, graph
from suites.bench.report.pages import EVIL, OTHER_MACHINE, given, history, step


class Page(HTMLParser):
    """Tags with attributes, and the text of scripts, as a browser's parser finds them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside != "style":
            self.text += data

    def figures(self) -> dict[str, dict[str, Any]]:
        ids = [attrs["id"] for tag, attrs in self.tags if tag == "script" and attrs.get("type") == "application/json"]
        return {str(name): json.loads(text) for name, text in zip(ids, self.scripts, strict=False)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "deep" / "report"
    stored = [*history(3), *history(2, machine=OTHER_MACHINE)]
    plans = [
        given(stored=stored, plan="plans/tiny.toml", dirty=True),
        given(plan="plans/tiny.toml", row="fp32"),
        given(plan=f"plans/{EVIL}.toml", commit=None, graphs={"bucketed": graph(bucket(EVIL)), "unbucketed": graph()}),
    ]
    paths = write_report(folder, plans)
    assert sorted(paths) == sorted(folder.iterdir())
    return folder


def test_a_page_and_its_traces_for_each_plan_and_an_index(written: Path) -> None:
    names = {path.name for path in written.iterdir()}
    assert {
        "index.html",
        "plans.tiny.html",
        "plans.tiny.bucketed.trace.json",
        "plans.tiny.unbucketed.trace.json",
        "plans.tiny.fp32.html",
    } <= names
    links = [str(attrs["href"]) for tag, attrs in Page(written / "index.html").tags if tag == "a"]
    assert len(links) == 3
    assert set(links) <= names
    links = [str(attrs["href"]) for tag, attrs in Page(written / "plans.tiny.html").tags if tag == "a"]
    assert links == ["plans.tiny.bucketed.trace.json", "plans.tiny.unbucketed.trace.json"]


def test_a_trace_holds_every_span(written: Path) -> None:
    trace = json.loads((written / "plans.tiny.bucketed.trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(step(2))
    assert trace["otherData"]["plan"] == "plans/tiny.toml"
    assert trace["otherData"]["variant"] == "bucketed"


def test_plotly_stands_in_each_page_once_and_not_in_the_index(written: Path) -> None:
    for path in written.glob("*.html"):
        count = sum(len(script) > 1_000_000 for script in Page(path).scripts)
        assert count == (0 if path.name == "index.html" else 1)


def test_nothing_is_loaded_from_elsewhere(written: Path) -> None:
    for path in written.glob("*.html"):
        page = Page(path)
        for tag, attrs in page.tags:
            assert "src" not in attrs, tag
            target = attrs.get("href") or ""
            assert re.fullmatch(r"data:,|[^:/]+", target) or not target, target
        (policy,) = (attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
        assert str(policy).startswith("default-src 'none';")
        assert "http" not in str(policy)
        style = path.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
        assert "url(" not in style
        assert "@import" not in style


def test_names_are_text_wherever_they_stand(written: Path) -> None:
    (path,) = (path for path in written.glob("*.html") if "onerror" in path.name)
    for page in (Page(path), Page(written / "index.html")):
        assert not [tag for tag, _ in page.tags if tag == "img"]
        assert f"plans/{EVIL}.toml" in page.text
    page = Page(path)
    assert EVIL in page.text.partition("Buckets by exposed time")[2]
    assert "no commit" in page.text
    assert set(page.figures()) == {"samples-0", "step-0", "step-1"}


def test_names_in_figures_are_no_tags_to_plotly(tmp_path: Path) -> None:
    one = given()
    spans = step(1, module='<a href="http://elsewhere/">wq</a>')
    write_report(tmp_path, [ReportInput(one.record, (), {"bucketed": spans})])
    text = json.dumps(Page(tmp_path / "plans.tiny.html").figures()["step-0"])
    assert "&lt;a href=&quot;http" in text
    assert "<a" not in text


def test_no_text_in_a_figure_ends_its_script(tmp_path: Path) -> None:
    figure = {"layout": {"title": f"{EVIL}<!--<script>"}}
    (tmp_path / "page.html").write_text(html_page("page.html", "title", {"one": figure}), encoding="utf-8")
    page = Page(tmp_path / "page.html")
    assert page.figures() == {"one": figure}
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.tags if tag == "img"]


def test_equal_input_gives_equal_bytes_and_a_file_as_it_was_is_left_alone(written: Path, tmp_path: Path) -> None:
    one = given(stored=history(3))
    first = {path.name: path.read_bytes() for path in write_report(tmp_path / "a", [one])}
    again = {path.name: path.read_bytes() for path in write_report(tmp_path / "b", [given(stored=history(3))])}
    assert first == again
    before = {path: path.stat().st_ino for path in (tmp_path / "a").iterdir()}
    write_report(tmp_path / "a", [one])
    assert {path: path.stat().st_ino for path in (tmp_path / "a").iterdir()} == before


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    write_report(tmp_path, [given()])
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert oct(write_report(tmp_path / "new", [])[0].parent.stat().st_mode)[-3:] == "700"


def test_a_folder_that_cannot_be_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchmarkError, match=r"the report cannot be written to .*/file/below: Not a directory"):
        write_report(tmp_path / "file" / "below", [given()])


@pytest.mark.parametrize(
    ("titles", "names"),
    [
        (["a/b.toml", "a/b.toml[fp32]"], ["a.b", "a.b.fp32"]),
        (["a/b.toml", "a.b.toml"], ["a.b.#", "a.b.#"]),
        (["a/B.toml", "a/b.toml"], ["a.B.#", "a.b.#"]),
        (["index.toml"], ["index.#"]),
        (["a.toml", "a.toml"], ["a.#", "a.#.2"]),
        (["../../x y.toml"], ["x.y"]),
        (["mod:callable", "torch"], ["mod.callable", "torch"]),
    ],
)
def test_names_of_files_never_meet(titles: list[str], names: list[str]) -> None:
    found = file_names(titles, taken=["index"])
    assert [re.sub(r"[0-9a-f]{8}", "#", name) for name in found] == names
    assert len({name.lower() for name in found}) == len(titles)
    assert all(re.fullmatch(r"[\w.=+-]+", name) and not name.startswith(".") for name in found)


def test_runs_on_other_machines_stand_apart_and_say_why(written: Path) -> None:
    page = Page(written / "plans.tiny.html")
    figures = page.figures()
    assert {"samples-0", "samples-1"} <= set(figures)
    assert (
        "Not comparable with this run: another machine: cores was 8 and is 2, cpu was Intel Xeon 6960P and is AMD EPYC 9B14"
        in page.text
    )
    labels = [figures[name]["layout"]["xaxis"]["ticktext"] for name in ("samples-0", "samples-1")]
    assert labels[0] == ["000000001", "000000002", "000000003", "<b>this run</b><br>fffffffff<br>dirty"]
    assert labels[1] == ["000000001", "000000002"]


def test_a_key_that_came_later_and_is_null_sets_no_run_apart() -> None:
    later = {**WORKLOAD, "parallel": {**WORKLOAD["parallel"], "new": None}}
    old = Record.from_dict(fields(0.02, time="2026-11-20T00:00:00+00:00"), "old")
    now = Record.from_dict(fields(workload=later), "now")
    assert [one.records for one in grouped(now, [old])] == [(old, now)]


def test_buckets_stand_by_exposed_time_and_long_lists_say_how_many_more(written: Path) -> None:
    text = Page(written / "plans.tiny.html").text.partition("Buckets by exposed time")[2]
    assert text.index("all_gather layers.1") < text.index("all_gather layers.0")
    assert text.index("all_gather layers.39.w") < text.index("all_gather layers.38.w")
    assert "and 15 more, each less exposed" in text


def test_a_page_without_timelines_says_so_and_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    graphs = {"bucketed": graph(bucket("all_gather layers.0", None)), "unbucketed": graph()}
    paths = write_report(tmp_path, [ReportInput(given(graphs=graphs).record)])
    assert [path.name for path in paths] == ["index.html", "plans.tiny.html"]
    page = Page(paths[1])
    assert "No timeline was taken." in page.text
    assert set(page.figures()) == {"samples-0"}
    cells = re.findall(r"<td>([^<]*)</td>", paths[1].read_text(encoding="utf-8").partition("exposed time")[2])
    assert cells == ["all_gather layers.0", "forward", "4.0 KiB", "2.000 ms", "-"]


def test_a_pass_that_ran_beside_has_its_row_its_step_and_its_trace(tmp_path: Path) -> None:
    one = given()
    samples = {**one.record.samples, "mine:my_pass": one.record.samples["unbucketed"]}
    record = replace(one.record, samples=samples)
    paths = write_report(tmp_path, [ReportInput(record, (), {**one.spans, "mine:my_pass": step(2)})])
    assert "plans.tiny.mine.my_pass.trace.json" in {path.name for path in paths}
    page = Page(paths[1])
    assert set(page.figures()) == {"samples-0", "step-0", "step-1", "step-2"}
    boxes = [attrs["value"] for tag, attrs in page.tags if tag == "input"]
    assert boxes == ["bucketed", "unbucketed", "mine:my_pass"]


def test_a_simulated_step_is_drawn_beside_measured_ones_on_a_scale_of_its_own(tmp_path: Path) -> None:
    one = given()
    plain = Page(write_report(tmp_path / "plain", [one])[1])
    paths = write_report(tmp_path, [ReportInput(one.record, (), {**one.spans, "simulated on h100-sxm": step(1, 9_000_000)})])
    assert "plans.tiny.simulated.on.h100-sxm.trace.json" in {path.name for path in paths}
    page = Page(paths[1])
    linked = [attrs["data-figure"] for tag, attrs in page.tags if "data-linked" in attrs]
    assert linked == ["step-0", "step-1"]
    rows = [text.count("simulated on h100-sxm") for text in (plain.text, page.text)]
    assert rows == [0, 2]  # its box and its heading, and no row of what was measured
    found, before = page.figures(), plain.figures()
    assert (found["step-0"], found["step-1"]) == (before["step-0"], before["step-1"])
    assert found["step-2"]["layout"]["xaxis"]["range"] == [
        0,
        pytest.approx(1.01 * max(s.end_ns for s in step(1, 9_000_000)) / 1e6),
    ]
    assert "KiB<br>" in json.dumps(found["step-2"]["data"])


def test_a_page_says_what_of_a_step_it_does_not_draw(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, [given(ranks=9)])[1])
    assert page.text.count("8 of 9 ranks are drawn, among them rank 8, which ends last; all of it: plans.tiny.") == 2
