"""``fxbucket simulate``, and what ``explain`` says where there is a cluster: tables, documents, else a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from suites.plans.traced import TRACED

ROOT = Path(__file__).parents[2]
PAGE = (
    (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("\n## simulate\n")[2].partition("\n## ")[0]
)
MODEL = """
[model]
factory = "suites.eager.ringed:build"
args = { dim = 16 }
batch = "suites.eager.ringed:batch"
loss = "suites.eager.ringed:loss"

[parallel]
dp_shard = 4

[bucket]
plan = ["0", "1"]
"""
SLOW = '[cluster]\npreset = "h100-sxm"\nwithin = { bandwidth = 0.1 }\n'
Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(TRACED + SLOW)
    (tmp_path / "bare.toml").write_text(TRACED)
    return path


def said(capsys: Capsys, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


_SIMULATED: list[dict[str, Any]] = []


def as_given(capsys: Capsys) -> dict[str, Any]:
    """The document on the plan of the fixture, which is the same every time, so it is asked for once."""
    if not _SIMULATED:
        _SIMULATED.append(document(capsys, "simulate", "plan.toml"))
    return _SIMULATED[0]


def document(capsys: Capsys, *words: str) -> dict[str, Any]:
    found = json.loads(said(capsys, *words, "--json"))
    assert isinstance(found, dict)
    return found


def test_the_table_and_the_document_say_the_same(plan: Path, capsys: Capsys) -> None:
    text, found = said(capsys, "simulate", "plan.toml"), as_given(capsys)
    assert "schedule" not in found
    (one,) = found["classes"]
    after, before = one["bucketed"], one["unbucketed"]
    assert text.splitlines()[0] == "plan.toml: 4 ranks on h100-sxm with figures of its own, pass manual"
    assert after["rest"] > 0
    assert after["rest"] == pytest.approx(after["seconds"] - after["compute"] - after["exposed"])
    for label, key in (("step", "seconds"), ("compute", "compute"), ("exposed", "exposed"), ("else", "rest")):
        assert re.search(rf"^{label} +{1000 * after[key]:.3f} ms +{1000 * before[key]:.3f} ms$", text, re.MULTILINE)
    assert f" {after['hidden']} of {after['launches']}" in text
    assert before["launches"] > after["launches"] == len(one["buckets"])
    exposed = sorted((bucket for bucket in one["buckets"] if bucket["why"]), key=lambda bucket: -bucket["exposed"])
    assert exposed
    rows = re.findall(r"^  ((?:forward|backward) .+?) +([\d.]+) +([\d.]+)  (.+)$", text, re.MULTILINE)
    assert [(name, ms) for name, ms, *_ in rows] == [(one["name"], f"{1000 * one['exposed']:.3f}") for one in exposed]
    assert sum(bucket["exposed"] for bucket in one["buckets"]) == pytest.approx(after["exposed"])
    assert sum(living["bytes"] for living in after["living"]) == after["peak_bytes"]
    assert f"at the peak, {after['peak_node']} in the joint graph" in text


def test_every_key_of_the_document_is_on_its_page(plan: Path, capsys: Capsys) -> None:
    keys: set[str] = set()
    todo: list[Any] = [as_given(capsys)]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            keys |= set(value) - {"pp", "dp_replicate", "dp_shard", "cp", "tp"}
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    assert {key for key in keys if not re.search(rf"`{key}`", PAGE)} == set()


def test_another_cluster_and_another_world_are_simulated_instead(plan: Path, capsys: Capsys) -> None:
    (plan.parent / "slower.toml").write_text('preset = "h100-sxm"\nwithin = { bandwidth = 0.01 }\n')
    own = as_given(capsys)
    fast = document(capsys, "simulate", "plan.toml", "--cluster", "b200")
    slower = document(capsys, "simulate", "plan.toml", "--cluster", "slower.toml")
    many = document(capsys, "simulate", "plan.toml", "--cluster", "b200", "--world", "dp_shard=32", "--world", "dp_replicate=1")
    assert [one["cluster"] for one in (own, fast, slower, many)] == [
        "h100-sxm with figures of its own",
        "b200",
        "slower",
        "b200",
    ]
    exposed = [one["classes"][0]["bucketed"]["exposed"] for one in (fast, own, slower)]
    assert exposed == sorted(exposed)
    assert len(set(exposed)) == 3
    assert (own["mesh"]["dp_shard"], many["mesh"]["dp_shard"]) == (4, 32)
    assert many["classes"][0]["buckets"][0]["end"] > fast["classes"][0]["buckets"][0]["end"], "it has more hops"


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["bare.toml"], 2, "bare.toml has no [cluster]; name one, as in --cluster h100-sxm"),
        (["bare.toml", "--cluster", "h100"], 1, 'there is no preset "h100"; did you mean "h100-sxm"?'),
        (["bare.toml", "--cluster", "ours.toml"], 1, "ours.toml: the preset cannot be read"),
        (["plan.toml", "--world", "dp_shrd=2"], 2, 'there is no dimension "dp_shrd"; did you mean "dp_shard"?'),
        (["plan.toml", "--world", "dp_shard"], 2, "a size must be a whole number, as in dp_shard=512"),
        (["plan.toml", "--world", "dp_shard=" + "9" * 5000], 2, "a size must be a whole number, as in dp_shard=512"),
        (["plan.toml", "--world", "dp_shard=0"], 1, "--world dp_shard must be a whole number of at least 1, not 0"),
        (["plan.toml", "--world", "dp_shard=1"], 1, "makes a mesh of one rank, which has nobody to talk to"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_one_sentence(
    plan: Path, refused: Refused, words: list[str], status: int, sentence: str
) -> None:
    refused(["simulate", *words], status, sentence)


def test_ranks_of_pipeline_stages_are_told_apart(plan: Path, capsys: Capsys) -> None:
    staged = '[pipeline]\ncuts = ["0"]\nschedule = "GPipe"\n[step]\nmicrobatches = 2\nclip_norm = 1.0\n'
    optimizer = '[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }\n[[matrix]]\nid = "row"\nrun.steps = 4\n'
    plan.write_text(MODEL.replace("dp_shard = 4", "dp_shard = 2\npp = 2") + staged + optimizer)
    text = said(capsys, "simulate", "plan.toml", "--cluster", "h100-sxm")
    assert re.findall(r"^rank (.+)$", text, re.MULTILINE) == ["0, 1", "2, 3"]
    assert "this is the plan above its [[matrix]] rows" in text
    assert re.search(r"^  optimizer all_reduce \S+ in update ", text, re.MULTILINE)
    found = document(capsys, "simulate", "plan.toml", "--cluster", "h100-sxm")
    schedule, idle = found["schedule"], [100 * one for one in found["schedule"]["bubbles"]]
    assert (
        f"2 stages by GPipe: a step of {1000 * schedule['seconds']:.3f} ms, in which ranks along pp idle "
        f"{idle[0]:.1f}, {idle[1]:.1f} % of the schedule; below" in text
    )
    assert schedule["bubble"] == pytest.approx(sum(schedule["bubbles"]) / 2)
    assert schedule["seconds"] > max(one["bucketed"]["seconds"] for one in found["classes"])


def test_explain_says_how_exposed_each_bucket_is_and_why(plan: Path, capsys: Capsys) -> None:
    text, found = said(capsys, "explain", "plan.toml"), document(capsys, "explain", "plan.toml")
    simulated = as_given(capsys)["classes"][0]
    flat = " ".join(text.split())
    assert "simulated on h100-sxm with figures of its own: " in text
    for one in simulated["buckets"]:
        assert (f"{one['name']}: {1000 * one['exposed']:.3f} ms exposed" in flat) == bool(one["why"])
        assert f"{one['name']}: hidden" not in flat
    buckets = {one["launch"]: one["simulated"] for one in found["graphs"]["joint"]["buckets"]}
    keys = ("why", "behind", "launched", "start", "end", "waited", "exposed")
    assert buckets == {one["launch"]: {key: one[key] for key in keys} for one in simulated["buckets"]}
    assert found["cluster"] == "h100-sxm with figures of its own"


def test_explain_why_says_it_of_the_parameters_buckets(plan: Path, capsys: Capsys) -> None:
    flat = " ".join(said(capsys, "explain", "plan.toml", "--why", "layers.0.weight").split())
    (one,) = document(capsys, "explain", "plan.toml", "--why", "layers.0.weight")["why"]
    told = [place["simulated"] for place in one["places"]]
    assert len(told) == 2, "backward reads no weight of the first layer"
    assert all(f"simulated {text}" in flat for text in told)
    assert any(re.fullmatch(r"on .+: [\d.]+ ms exposed, [\d.]+ ms in flight: .+", text) for text in told)
    bare = document(capsys, "explain", "bare.toml", "--why", "layers.0.weight")["why"][0]
    assert {place["simulated"] for place in bare["places"]} == {None}


def test_explain_of_a_plan_without_a_cluster_simulates_nothing(plan: Path, capsys: Capsys) -> None:
    assert "simulated" not in said(capsys, "explain", "bare.toml")
    assert document(capsys, "explain", "bare.toml")["cluster"] is None
