"""The picture of stages: each in the row of its rank, an arrow for each cut with its bytes, and text as text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_fxbucket.bench.report.page import write_report
from pytest_fxbucket.bench.report.stages import BOX, picture_of, write_stages_page
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.pipeline.of_plan import PlannedStages, planned_stages
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.bench.report.pages import EVIL, given
from suites.bench.report.test_written_report import Page

PLAN = """
[model]
factory = "suites.cli.staged_nets:build"
batch = "suites.cli.staged_nets:batch"
[parallel]
dp_shard = 2
pp = 2
[pipeline]
cuts = ["layers.0", "layers.1", "layers.2"]
schedule = "ZBVZeroBubble"
[step]
microbatches = 4
[bucket]
unplanned = "root"
"""
CROSSING = 2 * 6 * 8 + 2 * 2 * 6 * 16 * 4
"""Labels, the embedding, and what the last linear of a stage made."""


@pytest.fixture(scope="module")
def found() -> tuple[Plan, PlannedStages]:
    (plan,) = parse_plans(PLAN, Path("p.toml"))
    return plan, planned_stages(plan)


def test_boxes_stand_in_the_rows_of_their_ranks_and_touch_none(found: tuple[Plan, PlannedStages]) -> None:
    picture = picture_of(*found)
    rows = sorted({box["y"] for box in picture["boxes"]})
    assert [rows.index(box["y"]) for box in picture["boxes"]] == [0, 1, 1, 0]
    assert all(one["x"] + BOX[0] < other["x"] for one, other in pairwise(picture["boxes"]))
    assert all(one + BOX[1] < other for one, other in pairwise(rows))
    assert all(box["x"] + BOX[0] < picture["width"] for box in picture["boxes"])
    assert all(box["y"] + BOX[1] < picture["height"] for box in picture["boxes"])


def test_an_arrow_of_each_cut_has_its_bytes_and_its_values(found: tuple[Plan, PlannedStages]) -> None:
    arrows = picture_of(*found)["arrows"]
    assert [(arrow["text"], arrow["is_sent"]) for arrow in arrows] == [
        (f"{CROSSING / 1024:.1f} KiB", True),
        (f"{CROSSING / 1024:.1f} KiB", False),
        (f"{CROSSING / 1024:.1f} KiB", True),
    ]
    assert [line.partition(" ")[0] for line in arrows[0]["title"].splitlines()][:2] == ["labels", "embedding"]
    assert [line.endswith(", passed by") for line in arrows[1]["title"].splitlines()] == [True, True, False]


def test_arrows_go_from_box_to_box(found: tuple[Plan, PlannedStages]) -> None:
    picture = picture_of(*found)
    for arrow, (one, other) in zip(picture["arrows"], pairwise(picture["boxes"]), strict=True):
        x, y, *_, to_x, to_y = map(int, re.findall(r"-?\d+", arrow["path"]))
        assert (x, y) == (one["x"] + BOX[0], one["y"] + BOX[1] // 2)
        assert one["x"] + BOX[0] < to_x < other["x"]
        assert to_y == other["y"] + BOX[1] // 2


def test_the_page_of_stages_has_all_text_as_text(found: tuple[Plan, PlannedStages], tmp_path: Path) -> None:
    write_stages_page(tmp_path / "deep" / "stages.html", EVIL, *found)
    page = Page(tmp_path / "deep" / "stages.html")
    assert [tag for tag, _ in page.tags].count("rect") == 4
    assert [tag for tag, _ in page.tags].count("script") == 0
    assert EVIL in page.text
    assert "Tied: embed.weight is in stages 0, 3." in page.text
    assert "4 stages on 2 ranks of pp by ZBVZeroBubble, 4 microbatches; ranks idle" in page.text
    assert [attributes.get("stroke-dasharray") for tag, attributes in page.tags if tag == "path"][1:] == [None, "5 4", None]


def test_the_report_of_a_plan_with_stages_shows_them_and_others_do_not(tmp_path: Path) -> None:
    (plan,) = parse_plans(PLAN, tmp_path / "p.toml")
    run = PlanRun(plan, RunSettings(tmp_path, tmp_path, tmp_path), Pools())
    pictures = {"with": run.stages_picture(), "without": None}
    pages = [write_report(tmp_path / name, [replace(given(), stages=one)])[1] for name, one in pictures.items()]
    assert [[tag for tag, _ in Page(page).tags].count("rect") for page in pages] == [4, 0]
    unstaged = PlanRun(replace(plan, pipeline=None), RunSettings(tmp_path, tmp_path, tmp_path), Pools())
    assert unstaged.stages_picture() is None


def test_a_page_that_cannot_be_written_is_told(
    found: tuple[Plan, PlannedStages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchmarkError, match=r"/file/stages\.html cannot be written: "):
        write_stages_page(tmp_path / "file" / "stages.html", "p.toml", *found)
    monkeypatch.setattr("pytest_fxbucket.bench.report.stages.find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"^a page needs jinja2, which is not installed; install it with pip install"):
        write_stages_page(tmp_path / "stages.html", "p.toml", *found)
