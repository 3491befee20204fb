"""``fxbucket stages``: what stages hold and what crosses them, by hand; and the one sentence of what cannot be cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from suites.cli.staged_nets import DIM, LENGTH, ROWS, VOCAB

Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]
PLAN = """
[model]
factory = "suites.cli.staged_nets:build"
batch = "suites.cli.staged_nets:batch"

[parallel]
dp_shard = 2
pp = 3

[pipeline]
cuts = ["layers.0", "layers.2"]

[step]
microbatches = 4

[bucket]
unplanned = "root"
plan = ["layers.0"]
"""
VALUE = ROWS // 4 * LENGTH * DIM * 4
"""Bytes of a float32 activation of one microbatch."""
TOKENS = ROWS // 4 * LENGTH * 8
LINEAR = DIM * DIM + DIM


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "staged.toml"
    path.write_text(PLAN)
    return path


def changed(plan: Path, *pairs: tuple[str, str]) -> str:
    text = plan.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    plan.write_text(text)
    return str(plan)


def lines(capsys: Capsys, *arguments: str) -> list[str]:
    assert main(["stages", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def document(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("\n".join(lines(capsys, *arguments, "--json")))
    return found


def named(values: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["name"], one["bytes"]) for one in values]


def test_stages_are_counted_as_by_hand(plan: Path, capsys: Capsys) -> None:
    found = document(capsys, str(plan))
    first, second, third = found["stages"]
    assert [stage["parameters"] for stage in (first, second, third)] == [VOCAB * DIM + LINEAR, 2 * LINEAR, VOCAB * DIM + LINEAR]
    assert [stage["parameter_bytes"] for stage in (first, second, third)] == [
        4 * stage["parameters"] for stage in (first, second, third)
    ]
    tokens = ROWS // 4 * LENGTH
    assert [stage["flops"] for stage in (first, second, third)] == [
        tokens * 2 * DIM * DIM,
        tokens * 2 * DIM * DIM * 2,
        tokens * 2 * (DIM * DIM + DIM * VOCAB),
    ]
    assert second["modules"] == ["layers.1", "layers.2"]
    assert (found["cuts"], found["proposed_by"]) == (["layers.0", "layers.2"], None)


def test_what_crosses_is_told_stage_by_stage(plan: Path, capsys: Capsys) -> None:
    found = document(capsys, str(plan))
    first, second, third = found["stages"]
    assert named(first["receives"]) == [("tokens", TOKENS), ("labels", TOKENS)]
    assert named(first["bypasses"]) == [("labels", TOKENS)]
    assert [(one["module"], one["bytes"]) for one in first["makes"]] == [("embed", VALUE), ("layers.0", VALUE)]
    assert {one["name"] for one in second["receives"]} == {"labels", *(one["name"] for one in first["makes"])}
    assert [(one["module"], one["made_in"]) for one in second["bypasses"]] == [("", 0), ("embed", 0)]
    assert [one["module"] for one in second["makes"]] == ["layers.2"]
    assert (third["makes"], third["passes_on"], third["bypasses"]) == ([], [], [])
    assert {one["dtype"] for one in third["receives"]} == {"int64", "float32"}
    assert {tuple(one["shape"]) for one in third["receives"]} == {(2, LENGTH), (2, LENGTH, DIM)}
    assert found["crossing_bytes"] == found["sent_bytes"] == 2 * (TOKENS + 2 * VALUE)
    assert found["ties"] == [{"fqn": "embed.weight", "stages": [0, 2]}]


def test_what_a_hook_of_the_model_reads_crosses_as_it_does_in_a_step(plan: Path, capsys: Capsys) -> None:
    changed(plan, ("nets:build", "nets:hooked"))
    found = document(capsys, str(plan))
    assert named(found["stages"][1]["bypasses"])[:2] == [("tokens", TOKENS), ("labels", TOKENS)]
    assert found["crossing_bytes"] == 2 * (2 * TOKENS + 2 * VALUE)


def test_a_value_that_is_read_and_passed_on_is_told_so(plan: Path, capsys: Capsys) -> None:
    """The embedding, where the first layer is a stage of its own."""
    changed(plan, ('"layers.0", "layers.2"', '"embed", "layers.0"'))
    second = document(capsys, str(plan))["stages"][1]
    assert [one["module"] for one in second["passes_on"]] == ["embed"]
    assert named(second["bypasses"]) == [("labels", TOKENS)]


def test_the_text_says_the_same_to_people(plan: Path, capsys: Capsys) -> None:
    text = lines(capsys, str(plan))
    assert text[:2] == [
        "staged.toml: 3 stages on 3 ranks of pp by 1F1B, 4 microbatches",
        'cuts: ["layers.0", "layers.2"]',
    ]
    assert "stage 1 on rank 1: 544 parameters (2.1 KiB), 12,288 FLOPs" in text
    at = text.index("stage 1 on rank 1: 544 parameters (2.1 KiB), 12,288 FLOPs")
    assert text[at + 1] == "  modules    layers.1, layers.2"
    assert text[at + 2] == "  receives   labels [2, 6] int64, 96 B, of the batch"
    assert text[at + 3] == "             embedding [2, 6, 16] float32, 768 B, made in stage 0 by embed"
    assert [line.split()[0] for line in text[at + 5 : at + 8]] == ["makes", "bypasses", "embedding"]
    assert "tied: embed.weight in stages 0, 2" in text
    assert "crossing: 3.2 KiB in forward of a microbatch, 3.2 KiB of it between ranks" in text
    assert text[-1] == (
        "bubble: 33.3 % of the ranks' time if a backward takes as long as two forwards; (p - 1) / (m + p - 1) is 33.3 %"
    )


def test_stages_in_a_v_cross_within_a_rank_and_have_no_book(plan: Path, capsys: Capsys) -> None:
    changed(
        plan,
        ("pp = 3", "pp = 2"),
        ('"layers.0", "layers.2"]', '"layers.0", "layers.1", "layers.2"]\nschedule = "ZBVZeroBubble"'),
    )
    found = document(capsys, str(plan))
    assert [stage["rank"] for stage in found["stages"]] == [0, 1, 1, 0]
    crossing = TOKENS + 2 * VALUE
    assert (found["crossing_bytes"], found["sent_bytes"]) == (3 * crossing, 2 * crossing)
    assert found["bubble_by_the_book"] is None
    assert 0 < found["bubble"] < 1
    assert "is" not in lines(capsys, str(plan))[-1].split("%")[-1]


def test_parameters_that_forward_does_not_read_are_in_no_stage(plan: Path, capsys: Capsys) -> None:
    changed(plan, ('batch = "suites', 'args = { unread = true }\nbatch = "suites'))
    assert document(capsys, str(plan))["unread"] == ["spare.weight", "spare.bias"]
    assert "in no stage, since forward does not read them: spare.weight, spare.bias" in lines(capsys, str(plan))


def test_modules_that_are_called_more_than_once_are_no_place_for_a_cut(plan: Path, capsys: Capsys) -> None:
    changed(plan, ("nets:build", "nets:shared"), ('"layers.0", "layers.2"', '"layers.0", "layers.3"'))
    found = document(capsys, str(plan))
    assert found["repeated"] == [{"fqn": "layers.1", "calls": 2}, {"fqn": "layers.1.0", "calls": 2}]
    said = "no place for a cut, since forward calls them more than once: layers.1 (2 times)"
    assert said in lines(capsys, str(plan))
    changed(plan, ("nets:shared", "nets:build"))
    assert document(capsys, str(plan))["repeated"] == []
    assert "no place" not in "\n".join(lines(capsys, str(plan)))


def test_values_cross_in_the_dtype_that_modules_compute_in(plan: Path, capsys: Capsys) -> None:
    changed(plan, ("pp = 3", 'pp = 3\nparam_dtype = "bfloat16"'))
    found = document(capsys, str(plan))
    assert {(one["name"], one["dtype"]) for one in found["stages"][2]["receives"]} >= {("labels", "int64")}
    assert {one["dtype"] for one in found["stages"][0]["makes"]} == {"bfloat16"}
    assert found["crossing_bytes"] == 2 * (TOKENS + VALUE)
    assert found["stages"][1]["parameter_bytes"] == 4 * 2 * LINEAR, "as they are stored"


@pytest.mark.parametrize(("by", "cuts"), [("parameters", ["layers.0", "layers.2"]), ("flops", ["layers.1", "layers.3"])])
def test_proposed_cuts_are_said(plan: Path, capsys: Capsys, by: str, cuts: list[str]) -> None:
    changed(plan, ('cuts = ["layers.0", "layers.2"]', f'stages = 3\nbalance = "{by}"'))
    found = document(capsys, str(plan))
    assert (found["proposed_by"], found["cuts"]) == (by, cuts)
    quoted = ", ".join(f'"{cut}"' for cut in cuts)
    assert lines(capsys, str(plan))[1] == f"cuts, proposed by {by}: [{quoted}]"


def test_cuts_by_seconds_part_what_takes_long(plan: Path, capsys: Capsys) -> None:
    """By parameters and FLOPs they would be behind the third of the modules; the second sorts two million numbers."""
    changed(
        plan,
        ("build", "uneven"), ("nets:batch", "nets:rows"), ("pp = 3", "pp = 2"), ("microbatches = 4", "microbatches = 2"),
        ('cuts = ["layers.0", "layers.2"]', 'stages = 2\nbalance = "seconds"'),
    )  # fmt: skip
    assert document(capsys, str(plan))["cuts"] in (["layers.0"], ["layers.1"])
    changed(plan, ("seconds", "parameters"))
    assert document(capsys, str(plan))["cuts"] == ["layers.2"]
    assert [line for line in lines(capsys, str(plan)) if "modules" in line][-1] == "  modules    layers.3"


def test_rows_are_told_by_their_names(plan: Path, capsys: Capsys) -> None:
    plan.write_text(PLAN + '[[matrix]]\nid = "gpipe"\npipeline.schedule = "GPipe"\n')
    assert lines(capsys, f"{plan}::gpipe")[0] == "staged.toml[gpipe]: 3 stages on 3 ranks of pp by GPipe, 4 microbatches"
    assert lines(capsys, str(plan))[-1] == (
        f"this is the plan above its [[matrix]] rows; a row is told as {plan}::gpipe: gpipe"
    )
    assert document(capsys, f"{plan}::gpipe")["row"] == "gpipe"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            '[pipeline]\ncuts = ["layers.0", "layers.2"]',
            "",
            "has no [pipeline]; add one, as in stages = 4, with pp = 4 in [parallel]",
        ),
        ('"layers.2"]', '"layer.2"]', ': [pipeline]: cut "layer.2" is no module of the model; did you mean "layers.2"?'),
        ('"layers.0", "layers.2"', '"layers.2", "layers.0"', ': [pipeline]: cut "layers.0" stands behind "layers.2"'),
        (
            'cuts = ["layers.0", "layers.2"]',
            "stages = 99",
            ": [pipeline]: the model has 6 modules to cut behind, too few for 99 stages; 7 is the most",
        ),
        (
            "microbatches = 4",
            "microbatches = 3",
            "[step] microbatches = 3 does not divide dimension 0 of a tensor of the batch",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(plan: Path, refused: Refused, old: str, new: str, says: str) -> None:
    stages = (("pp = 3", "pp = 99"), ("microbatches = 4", "microbatches = 1\n# 99")) if "99" in new else ()
    changed(plan, (old, new), *stages)
    if "99" in new:
        changed(plan, ("stages = 99", 'stages = 99\nschedule = "GPipe"'))
    if new == "":
        changed(plan, ("pp = 3", ""))
    refused(["stages", str(plan)], 1, says)


def test_a_page_with_the_picture_is_written_where_it_is_asked_for(plan: Path, capsys: Capsys) -> None:
    assert lines(capsys, str(plan), "--html", "made/stages.html")[0].startswith("staged.toml: 3 stages")
    assert "Stages of staged.toml" in (plan.parent / "made" / "stages.html").read_text()
