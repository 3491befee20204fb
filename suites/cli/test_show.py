"""``fxbucket show``: exactly what the golden holds, on any rank, and nothing else on stdout."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.golden.store import parse
from suites.cli.small_repository import ROOT, command, environment
from suites.cli.test_explain import PLAN

Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]
TRACED = str(ROOT / "fixtures/plans/traced.toml")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan with two rows, whose factory prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "plans" / "two.toml"
    path.parent.mkdir()
    path.write_text(PLAN)
    return path


def show(capsys: Capsys, *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_what_is_shown_is_the_golden_to_the_byte_from_any_folder(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = (ROOT / "golden/fixtures/plans/traced.txt").read_text()
    assert show(capsys, os.path.relpath(TRACED)) == golden
    monkeypatch.chdir(tmp_path)
    assert show(capsys, TRACED) == golden


def test_in_any_folder_and_on_any_hash_seed_stdout_has_the_text_and_nothing_else(tmp_path: Path, capsys: Capsys) -> None:
    """As a user would, in a process of its own."""
    words = [TRACED, "--full", "--rank", "1"]
    done = subprocess.run(
        command("show", *words), env=environment(PYTHONHASHSEED="7"), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(line.startswith("fixtures/plans/traced.toml: ") for line in done.stderr.splitlines()), "progress at most"
    assert done.stdout == show(capsys, *words)


def test_a_row_is_named_as_items_name_it_and_prints_of_models_stay_off_stdout(plan: Path, capsys: Capsys) -> None:
    assert main(["show", "plans/two.toml::golden[one_layer]"]) == 0
    said = capsys.readouterr()
    assert "\nplan plans/two.toml[one_layer]\n" in said.out
    assert parse(said.out, "stdout").count("forward all_gather") == 5, "only layers.0 is merged"
    assert "a factory that prints" in said.err
    assert "a factory that prints" not in said.out


def test_the_plan_above_the_rows_is_shown_and_stderr_says_how_to_get_a_row(plan: Path, capsys: Capsys) -> None:
    assert main(["show", "plans/two.toml"]) == 0
    said = capsys.readouterr()
    assert "a row is shown as plans/two.toml::one_layer\n" in said.err
    assert "\nplan plans/two.toml\n" in said.out


def test_every_rank_has_the_same_text_and_one_that_a_pass_treats_otherwise_is_shown_as_it_is(capsys: Capsys) -> None:
    assert len({show(capsys, TRACED, "--rank", str(rank)) for rank in range(4)}) == 1
    by_rank = [show(capsys, TRACED, "--pass", "suites.cli.explain_steps:not_on_rank_3", f"--rank={rank}") for rank in (0, 3)]
    assert ["2 members" in text for text in by_rank] == [True, False]


def test_full_lists_every_node_by_position_with_module_and_bucket(capsys: Capsys) -> None:
    text = show(capsys, TRACED, "--full")
    nodes = re.findall(r"^%(\d+) = (.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in nodes] == list(range(len(nodes)))
    assert "%0 = input param layers.0.weight  float32[2, 8]\n" in text
    assert re.search(
        r"^%\d+ = _c10d_functional.all_gather_into_tensor.default\(%\d+, 4, dp_shard\)  float32\[72\]  in forward layers.0"
        r"  # launch all_gather layers.0$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"wait_tensor.default\(%\d+\)  float32\[1, 18\]  in backward layers.2  # wait reduce_scatter layers.2\n", text
    )
    assert text.count("# launch ") == text.count("# wait ") == 8
    for_reading = text.partition("graph joint")[2]
    assert not re.search(r"0x[0-9a-f]{4}|/|_\d+\b(?<!_1d)", for_reading), "no address, path or node name"


def test_full_is_the_graph_that_runs_with_the_order_that_is_kept_in_it(plan: Path, capsys: Capsys) -> None:
    kept = plan.read_text().partition("[[")[0] + "[overlap]\ninsert_overlap_deps = true\n"
    plan.write_text(kept.replace("suites.cli.explain_steps:two_graphs", "fixtures.models.traced:step").replace(', "odd"', ""))
    text = show(capsys, str(plan), "--full")
    assert "fxbucket.after" in text
    assert text.count("# launch ") == text.count("# wait ") > 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["none.toml"], 2, "none.toml is not there\n"),
        (["plans/loop.toml"], 2, "plans/loop.toml is a link that leads nowhere\n"),
        (["x" * 5000], 2, "xxx is not there\n"),
        (["plans/twoo.toml::two"], 2, "plans/twoo.toml is not there; did you mean plans/two.toml?\n"),
        (["plans/two.toml::one_leyer"], 2, 'did you mean "one_layer"?'),
        (["plans/two.toml", "--pass", "manul"], 2, '--pass: "manul" is no pass; expected manual, torch or module:callable'),
        (["plans/two.toml", "--pass", "none:pass"], 1, 'pass none:pass: there is no module "none"'),
        (["plans/two.toml", "--rank", "4"], 2, "--rank 4 is not there; plans/two.toml has ranks 0 to 3"),
        (["plans/two.toml", "--rank=-1"], 2, "--rank -1 is not there; plans/two.toml has ranks 0 to 3"),
        (["plans/two.toml", "--rank", "x"], 2, "argument --rank: invalid int value: 'x'"),
        ([], 2, "arguments are required: PLAN[::ROW]"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(plan: Path, refused: Refused, arguments: list[str], code: int, says: str) -> None:
    Path("plans/loop.toml").symlink_to("loop.toml")
    refused(["show", *arguments], code, says)
