"""``fxbucket explain``: what people read, what programs read, equal layers as one row, a sentence where it cannot be had."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.explain.report import GraphReport
from pytest_fxbucket.explain.text import WIDTH, TextRow, fold, fold_names, graph_lines
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import UntouchedLaunch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "explain.md").read_text(encoding="utf-8")
PLAN = """
[graph]
factory = "suites.cli.explain_steps:two_graphs"

[parallel]
dp_shard = 4

[bucket]
plan = ["layers.[0-1]", "odd"]
unplanned = "allow"

[[matrix]]
id = "one_layer"
bucket.plan = ["layers.0"]

[[matrix]]
id = "size"
bucket.by = "size"
bucket.plan = []
bucket.unplanned = "error"
bucket.cap_mb = 1
"""
Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "two.toml"
    path.write_text(PLAN)
    return path


def explain(capsys: Capsys, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def document(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explain(capsys, *arguments, "--json"))
    return found


def test_people_see_each_graph_bucket_reason_and_what_was_left_alone(plan: Path, capsys: Capsys) -> None:
    text = explain(capsys, "two.toml")
    assert text.startswith("two.toml: pass manual, 4 ranks\n\nforward graph: 6 launches became 4\n")
    assert "layers.1    2 -> 1        2  192 B  float32  dp_shard  2 nodes of layers.0" in text
    assert "layers.0 #1    1 -> 1        1   96 B  float32 avg  dp_shard  2 nodes of layers.[0-1]" in text
    assert "  it reduces by sum, others of its entry by avg, and a launch has one reduction\n" in text
    assert "    backward reduce_scatter of layers.0 #2\n" in text
    assert "  all_gather of odd.weight (forward): add_tensor_1 reads it before its wait\n" in text
    assert "  all_gather of extra.weight (forward): no entry names its parameter\n" in text
    assert text.endswith("two.toml::one_layer: one_layer, size\n")
    assert max(map(len, text.splitlines())) <= 120
    assert '"0"' not in text, "process groups are named by mesh dimension"


def test_programs_get_one_document_with_the_same(plan: Path, capsys: Capsys) -> None:
    assert main(["explain", "two.toml", "--json"]) == 0
    said = capsys.readouterr()
    assert "a factory that prints" in said.err
    found = json.loads(said.out)
    assert said.out == json.dumps(found, indent=2, sort_keys=True) + "\n"
    assert {key: found[key] for key in ("plan", "row", "rows", "pass", "ranks", "said_by")} == {
        "plan": "two.toml",
        "row": None,
        "rows": ["one_layer", "size"],
        "pass": "manual",
        "ranks": 4,
        "said_by": "pass",
    }
    assert found["entries"]["layers.1"] == ["layers.1.weight", "layers.1.bias"]
    forward, backward = found["graphs"]["forward"], found["graphs"]["backward"]
    assert [(b["label"], b["group"], b["members"], b["offsets"]) for b in forward["buckets"][:1]] == [
        ("layers.0", "dp_shard", ["layers.0.weight", "layers.0.bias"], [0, 24])
    ]
    assert forward["totals"] == {
        "buckets": 2,
        "bytes": 384,
        "hidden": 1,
        "launches_after": 2,
        "launches_before": 4,
        "members": 4,
    }
    assert [left["fqns"] for left in forward["left_alone"]] == [["extra.weight"], ["odd.weight"]]
    assert [split["reason"] for split in backward["buckets"][0]["splits"]] == ["op"]


def test_every_key_of_the_document_is_on_its_page(plan: Path, capsys: Capsys) -> None:
    both = [document(capsys, "two.toml"), document(capsys, "two.toml", "--why", "layers.0.*")]
    missing = {key for found in both for key in _keys(found) if not re.search(rf"\b{key}\b", PAGE)}
    assert missing == set()


def _keys(value: Any, names: bool = True) -> set[str]:
    """Keys of ``value`` and all below; those of graphs and entries are the user's."""
    if isinstance(value, list):
        return {key for item in value for key in _keys(item)}
    if not isinstance(value, dict):
        return set()
    below = {key for name, item in value.items() for key in _keys(item, name not in ("graphs", "entries"))}
    return (set(value) if names else set()) | below


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ("layers.0.weight", "with all others of its entry here: .bias"),
        ("0.bias", "because it reduces by sum, others of its entry by avg, and a launch has one reduction"),
        ("0.bias", "to change that: reduce both by the same operation"),
        ("0.bias", "not with bucket layers.0 #1: .weight"),
        ("layers.1.bias", "no gradient of it is reduced: it is frozen"),
        ("layers.1.weight", "alone"),
        ("odd.weight", "because add_tensor_1 reads it before its wait"),
        ("odd.weight", "to change that: nothing in the plan can change that"),
        ("extra.weight", 'to change that: add an entry such as "extra", or set bucket.unplanned = "root"; nearest entries:'),
        ("unused.weight", "no launch carries it"),
        ("count", "it is a buffer, no parameter"),
        ("layers.*.weight", "\nlayers.1.weight: entry layers.1\n"),
    ],
)
def test_a_parameter_s_place_is_told_with_what_to_change(plan: Path, capsys: Capsys, parameter: str, says: str) -> None:
    assert says in _why(capsys, parameter)


def test_a_glob_tells_equal_layers_once(capsys: Capsys) -> None:
    text = explain(capsys, str(ROOT / "fixtures/plans/traced.toml"), "--why", "layers.*.bias")
    assert text.startswith("layers.[0-2].bias: entry layers.[0-2]\n  forward all_gather: bucket layers.[0-2], bytes 64 to 72")


_ANSWERS: dict[str, str] = {}


def _why(capsys: Capsys, parameter: str) -> str:
    """The same plan every time, so each question is asked once."""
    if parameter not in _ANSWERS:
        _ANSWERS[parameter] = explain(capsys, "two.toml", "--why", parameter)
    return _ANSWERS[parameter]


@pytest.mark.parametrize("named", ["two.toml::one_layer", "two.toml[one_layer]", "two.toml::audit[one_layer]"])
def test_a_row_is_named_as_items_name_it(plan: Path, named: str) -> None:
    found, rows = find_plan(named)
    assert (found.matrix_id, [entry.name for entry in found.bucket.plan]) == ("one_layer", ["layers.0"])
    assert rows == ["one_layer", "size"]


def test_of_a_row_its_own_entries_are_told(plan: Path, capsys: Capsys) -> None:
    found = document(capsys, "two.toml::audit[one_layer]")
    assert (found["row"], list(found["entries"])) == ("one_layer", ["layers.0"])


def test_by_size_buckets_are_numbered_and_say_whose_compute_hides_them(plan: Path, capsys: Capsys) -> None:
    text = explain(capsys, "two.toml::size")
    assert text.startswith("two.toml[size]: pass manual, 4 ranks\n")
    assert "  #1: layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias, extra.weight\n" in text
    assert "5 -> 1" in text


def test_of_a_foreign_pass_what_its_graph_has_is_told_and_that_it_does_not_say_why(plan: Path, capsys: Capsys) -> None:
    foreign = "--pass=suites.cli.explain_steps:merges_nothing"
    text = explain(capsys, "two.toml", foreign)
    assert "it gives no report, so this is read off its graph, which does not say why" in text
    assert "forward graph: 6 launches became 6\n" in text
    found = document(capsys, "two.toml", foreign, "--why", "layers.0.weight")
    assert found["said_by"] == "graph"
    (reason, *_) = found["why"][0]["places"][0]["reasons"]
    assert reason["why"].endswith("gives no reason")


@pytest.mark.parametrize("name", ["traced.toml", "duplicates.toml[added]"])
def test_a_foreign_pass_that_is_ours_in_all_but_name_is_read_as_ours_reports_it(capsys: Capsys, name: str) -> None:
    """What is read off the graph and what the report says are the same, but for why, behind transformations too."""
    path = str(ROOT / "fixtures/plans" / name)
    ours = document(capsys, path)["graphs"]["joint"]
    theirs = document(capsys, path, "--pass=pytest_fxbucket.passes:manual_overlap_bucketing")["graphs"]["joint"]
    for one in (ours, theirs):
        for bucket in one["buckets"]:
            del bucket["splits"]
    assert theirs == ours


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["none.toml"], 2, "none.toml is not there\n"),
        (
            ["two.toml::one_leyer"],
            2,
            'has no [[matrix]] row "one_leyer"; rows there: one_layer, size; did you mean "one_layer"?',
        ),
        (
            ["two.toml", "--pass", "manul"],
            2,
            '--pass: "manul" is no pass; expected manual, torch or module:callable; did you mean "manual"?',
        ),
        (["two.toml", "--pass", "none:pass"], 1, 'pass none:pass: there is no module "none"'),
        (["two.toml", "--why", "layers.0.wieght"], 2, "did you mean layers.0.weight"),
        (["two.toml", "--why", "0.wieght"], 2, "did you mean layers.0.weight"),
        (["two.toml", "--why", "bias"], 2, '"bias" ends 2 parameters: layers.0.bias, layers.1.bias; write more of one'),
        (["two.toml", "--why", "layers.0"], 2, "it is a module, which holds layers.0.weight, layers.0.bias: name one of them"),
        ([], 2, "arguments are required: PLAN[::ROW]"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(plan: Path, refused: Refused, arguments: list[str], code: int, says: str) -> None:
    refused(["explain", *arguments], code, says)


def test_a_bare_graph_is_told_by_its_inputs_names_and_a_foreign_pass_on_it_is_refused(plan: Path, capsys: Capsys) -> None:
    text = plan.read_text().replace("suites.cli.explain_steps:two_graphs", "fixtures.models.traced:bare").partition("[[")[0]
    plan.write_text(text.replace(', "odd"', ""))
    (place, *_) = document(capsys, "two.toml", "--why", "*_1")["why"][0]["places"]
    assert place["bucket"] == "layers.0"
    assert main(["explain", "two.toml", "--pass=suites.cli.explain_steps:merges_nothing"]) == 1
    assert "without the roles of the graph's inputs none can be read off the graph" in capsys.readouterr().err


def test_a_parameter_is_told_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    plan = f"{ROOT}/fixtures/plans/buckets.toml::capped"
    told = explain(capsys, plan, "--why", "layers.1.feed_forward.w1.weight")
    assert "because cap_mb = 0.02 (20,972 bytes) is reached: 18,432 bytes, and layers.1" in told


def test_transformations_say_what_they_did_and_what_they_left(plan: Path, capsys: Capsys) -> None:
    text = PLAN.partition("[[matrix]]")[0]
    for order in (("telling", "bucket"), ("bucket", "telling")):
        tables = [f'[[transform]]\nname = "{name}"\n' for name in order]
        told = "".join(tables).replace('"telling"', '"suites.transforms.own_transforms:telling"\nargs = { word = "it" }')
        plan.write_text(text + told)
        assert "\ntelling: 1 change, 1 thing left as it was\n  said it\n  left: a launch: it was not asked for\n" in explain(
            capsys, "two.toml"
        )
    (found,) = document(capsys, "two.toml")["transformations"]
    assert found == {"transformation": "telling", "done": ["said it"], "left": [["a launch", "it was not asked for"]]}


# A whole step: what hides each reduction, which reductions each entry's updates are made of, what cannot move.


WHOLE = """
[graph]
factory = "suites.cli.explain_steps:by_entry"

[parallel]
dp_shard = 2

[bucket]
plan = ["a", "b", "c"]

[overlap]
updates = "ready"

[checks]
bitwise = false
same = false
eager = false
"""


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.toml").write_text(WHOLE)
    return "whole.toml"


def flat(text: str) -> str:
    return " ".join(text.split())


def joint(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = document(capsys, *arguments)["graphs"]["joint"]
    return found


def test_people_see_what_hides_each_reduction_and_what_each_update_is_made_of(whole: str, capsys: Capsys) -> None:
    told = flat(explain(capsys, whole))
    assert "nodes of a; 1 update: c" in told
    assert (
        "updates, and the reductions that they are made of a: 2 parameters and 6 states of reduce_scatter a "
        "b: 2 parameters and 6 states of reduce_scatter b c: 2 parameters and 6 states of reduce_scatter c left alone: nothing"
    ) in told


def test_programs_get_the_same_of_updates_and_of_a_foreign_pass_it_is_read_off_its_graph(whole: str, capsys: Capsys) -> None:
    found, theirs = joint(capsys, whole), joint(capsys, whole, "--pass=suites.cli.explain_steps:early")
    behind = {b["entry"]: b["updates"] for b in found["buckets"] if b["kind"] == "reduce_scatter"}
    assert behind == {"c": [], "b": ["c"], "a": ["b"]}
    assert found["updates"][0] == {
        "entry": "a",
        "parameters": ["a.w", "a.b"],
        "states": 6,
        "reductions": ["reduce_scatter a"],
    }
    for key in ("entry", "kind", "updates", "overlap_nodes"):
        assert [bucket[key] for bucket in theirs["buckets"]] == [bucket[key] for bucket in found["buckets"]]
    assert theirs["updates"] == found["updates"]


def test_with_clipping_each_update_is_made_of_all_reductions_and_why_none_moved_is_said(whole: str, capsys: Capsys) -> None:
    Path(whole).write_text(WHOLE.replace("by_entry", "clipped"))
    told = flat(explain(capsys, whole))
    assert "a: 2 parameters and 6 states of reduce_scatter c, reduce_scatter b, reduce_scatter a b: 2 parameters" in told
    assert "updates of a, b, c: they need the reductions of all of these, of which _foreach_norm_scalar makes one value" in told
    assert "1 update" not in told


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layers.0.w", "layers.1.w", "layers.2.w"], ["layers.[0-2].w"]),
        (["layers.2.w", "layers.1.w"], ["layers.[1-2].w"]),
        (["layers.0.w", "layers.2.w"], ["layers.0.w", "layers.2.w"]),
        (["layers.0.w", "layers.1.b", "layers.1.w"], ["layers.[0-1].w", "layers.1.b"]),
        (["blocks.0.layers.0", "blocks.0.layers.1", "blocks.1.layers.1"], ["blocks.0.layers.[0-1]", "blocks.1.layers.1"]),
        (["0.weight", "1.weight"], ["[0-1].weight"]),
        (["w1", "w2"], ["w1", "w2"]),
        (["layers.9", "layers.10", "layers.11"], ["layers.[9-11]"]),
    ],
)
def test_neighbouring_numbers_of_equal_names_are_a_range(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


def test_a_neighbour_in_a_cell_is_folded_along_and_another_one_keeps_rows_apart() -> None:
    rows = [TextRow(f"layers.{i}", (f"9 nodes of layers.{i - 1}",)) for i in range(1, 4)]
    (row,) = fold(rows)
    assert (row.entry, row.cells, row.count) == ("layers.[1-3]", ("9 nodes of layers.[0-2]",), 3)
    assert len(fold([*rows, TextRow("layers.4", ("9 nodes of layers.0",))])) == 2


def test_a_count_that_grows_with_the_layer_is_no_number_of_a_layer() -> None:
    rows = [TextRow(f"{i}", (f"{i} nodes",)) for i in range(3)]
    assert fold(rows) == rows
    assert [row.entry for row in fold([TextRow(f"{i}", ("9 nodes",)) for i in range(3)])] == ["[0-2]"]


def test_a_range_in_a_cell_is_folded_too() -> None:
    rows = [TextRow(f"layers.{i}", (f"of layers.[{i - 1}-{i}]",)) for i in (2, 3)]
    assert [row.cells for row in fold(rows)] == [("of layers.[1-3]",)]


def test_a_hundred_layers_and_long_names_fit_a_screen() -> None:
    """Whatever the names are: at most 120 columns, and equal layers in as many lines as one."""
    name = "a_module_with_quite_a_long_name"
    buckets = [
        BucketReport(
            entry=f"{name}.{i}",
            direction="forward",
            kind="all_gather",
            group="0",
            op="",
            dtype="float32",
            members=tuple(f"{name}.{i}.{part}.{'x' * 50}" for part in "abc"),
            bytes=1 << 30,
            launch=f"launch_{i}",
            launches_before=3,
            overlap_nodes=7,
            overlaps=(f"{name}.{i - 1}", "+".join(f"other.{n}" for n in range(4))),
        )
        for i in range(1, 101)
    ]
    left = tuple(UntouchedLaunch(f"all_gather of {name}.{i}.w (forward)", "no entry names its parameter") for i in range(100))
    barriers = ("custom.op (op_1) does not say what it writes: nothing is moved past it",)
    report = PassReport(400, 200, tuple(buckets), left, barriers=barriers)
    labels = {bucket.launch: bucket.entry for bucket in buckets}
    lines = list(graph_lines(GraphReport("joint", report, {"0": "dp_shard"}, {}, labels)))
    assert len(lines) < 25
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert f"all_gather of {name}.[0-99].w (forward): no entry names its parameter" in " ".join(text.split())
    assert "1 barrier\n  custom.op (op_1) does not say what it writes: nothing is moved past it" in text
