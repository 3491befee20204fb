"""``fxbucket tune``: the proposal as a diff, which ``--write`` puts into the file, as a document, stopped, and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.plan.load import load_plans, parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.progress import Progress
from pytest_fxbucket.tune.moves import key_of
from pytest_fxbucket.tune.score import PlanSimulator
from pytest_fxbucket.tune.search import SimulatedScore
from suites.tune.small_plans import ROOT, SMALL, STARS

PAGE = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8").partition("\n## tune\n")[2].partition("\n## ")[0]
TEXT = f"{STARS.replace(*SMALL)}# One layer after the other.\n\n[overlap]  # by hand\nprefetch = 0  # none ahead\n"
ROWS = '\n[[matrix]]\nid = "ahead"\noverlap.prefetch = 1\n'
Capsys = pytest.CaptureFixture[str]
Scored = Callable[[Plan], SimulatedScore]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def first() -> tuple[PlanSimulator, SimulatedScore]:
    """The plan scored: what is told of its model and of its step holds for all of these plans."""
    plan = parse_plans(TEXT, ROOT / "plan.toml")[0]
    cluster = cluster_of(plan)
    assert cluster is not None
    scorer = PlanSimulator(plan, cluster, lambda _: None)
    return scorer, scorer.score(plan)


@pytest.fixture
def guessed(first: tuple[PlanSimulator, SimulatedScore], monkeypatch: pytest.MonkeyPatch) -> Callable[[Scored], None]:
    """Have plans scored without a simulation behind the first."""
    known, score = first
    (facts,) = known._facts.values()

    def by(scored: Scored) -> None:
        def instead(self: PlanSimulator, plan: Plan) -> SimulatedScore:
            self._first, self._worlds = known._first, known._worlds
            self._facts[key_of(plan)] = facts
            return score if plan == self.start else scored(plan)

        monkeypatch.setattr(PlanSimulator, "score", instead)

    return by


def by_prefetch(plan: Plan) -> SimulatedScore:
    """The farther ahead the better, and nothing else is."""
    worse = plan.overlap.schedule == "auto" or not plan.overlap.defer_reduce or plan.overlap.gather_group == "own"
    return SimulatedScore(1.0 if worse or plan.bucket.cap_mb != (0.0,) else 1e-6 / (1 + plan.overlap.prefetch), 0.0, 10)


def diff_of(old: str, new: str) -> str:
    return "".join(unified_diff(*(text.splitlines(keepends=True) for text in (old, new)), "plan.toml", "plan.toml"))


def test_what_is_shown_is_what_is_written_and_nothing_else(
    plan: Path, guessed: Callable[[Scored], None], capsys: Capsys
) -> None:
    guessed(by_prefetch)
    plan.rename(plan.with_name("shared.toml"))
    plan.symlink_to("shared.toml")
    assert main(["tune", "plan.toml", "--write"]) == 0
    assert plan.is_symlink()
    said = capsys.readouterr().out
    assert "\nwritten to plan.toml; goldens and checks decide: pytest --fxbucket-plans=plan.toml\n" in said
    shown = said[said.index("--- plan.toml") : said.index("\nwritten to")]
    assert shown == diff_of(TEXT, plan.read_text()) != ""
    for comment in ("# One layer after the other.", "# by hand", "# none ahead"):
        assert comment in plan.read_text()
    assert load_plans(plan)[0].model == parse_plans(TEXT, plan)[0].model


def test_a_proposal_is_written_when_that_is_asked_for(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    guessed(by_prefetch)
    assert main(["tune", "plan.toml"]) == 0
    said = capsys.readouterr().out
    assert diff_of(TEXT, TEXT.replace("prefetch = 0", "prefetch = 3")) in said
    assert "this is a proposal: goldens and checks decide, once it is in the file" in said
    assert plan.read_text() == TEXT


def test_each_plan_is_told_on_stderr_however_short_it_takes(
    plan: Path, guessed: Callable[[Scored], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    after: list[float] = []

    def progress(after_s: float) -> Progress:
        after.append(after_s)
        found = Progress()
        monkeypatch.setattr(found, "say", said.append)
        return found

    monkeypatch.setattr("pytest_fxbucket.cli.common.on_stderr", progress)
    guessed(by_prefetch)
    assert main(["tune", "plan.toml"]) == 0
    assert max(after) < 1
    assert sum("[overlap] prefetch = 3; the best so far takes" in line for line in said) >= 1


def test_nothing_better_is_nothing_to_write(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    guessed(lambda plan: SimulatedScore(1.0, 0.0, 0))
    assert main(["tune", "plan.toml", "--write"]) == 0
    said = capsys.readouterr().out
    assert "\nnothing found that is better than the plan as it is\n" in said
    assert "---" not in said
    assert plan.read_text() == TEXT


def test_the_table_and_the_document_say_the_same(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    guessed(by_prefetch)
    assert main(["tune", "plan.toml"]) == 0
    text = capsys.readouterr().out
    assert main(["tune", "plan.toml", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    first, last = found["as_it_is"], found["proposed"]
    assert re.search(rf"^step +{1000 * first['seconds']:,.3f} ms +{1000 * last['seconds']:,.3f} ms$", text, re.MULTILINE)
    rows = re.findall(r"^(\[.+?\]) prefetch = (\d) +([\d.]+) +([\d.]+) +(10 B)$", text, re.MULTILINE)
    assert rows == [
        ("[overlap]", one["what"][-1], f"{1000 * one['gain']:.3f}", f"{1000 * one['seconds']:.3f}", "10 B")
        for one in found["changes"]
    ]
    assert found["changes"][-1]["what"] == "[overlap] prefetch = 3"
    assert found["diff"] in text
    assert (found["ended"], found["written"], found["refused"]) == ("done", False, 0)
    assert f"{found['simulated']} other plans simulated; nothing is left to try" in text
    keys = {*found, *first, *found["changes"][0]}
    assert {key for key in keys if not re.search(rf"`{key}`", PAGE)} == set()


def test_ctrl_c_gives_the_best_so_far_and_writes_nothing(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    def scored(plan: Plan) -> SimulatedScore:
        if plan.overlap.prefetch == 3:
            raise KeyboardInterrupt
        return by_prefetch(plan)

    guessed(scored)
    assert main(["tune", "plan.toml", "--write"]) == 130
    said = capsys.readouterr().out
    assert "-prefetch = 0  # none ahead\n+prefetch = 2  # none ahead\n" in said
    assert "stopped: this is the best so far, and nothing is written" in said
    assert plan.read_text() == TEXT


def test_ctrl_c_before_anything_is_known_is_told(plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def stopped(self: PlanSimulator, plan: Plan) -> SimulatedScore:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSimulator, "score", stopped)
    assert main(["tune", "plan.toml"]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "fxbucket: stopped before the plan as it is was simulated\n")


def test_memory_that_nothing_fits_into_is_told(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    guessed(lambda plan: SimulatedScore(1e-9, 0.0, 1 << 30))
    assert main(["tune", "plan.toml", "--memory-gb", "0.000001"]) == 0
    said = capsys.readouterr().out
    assert "of whose memory 1.0 KiB may be held" in said
    assert "none of them fits into 1.0 KiB" in said
    assert "nothing found that is better" in said


def test_a_search_without_time_tells_of_the_first_plan(plan: Path, capsys: Capsys) -> None:
    assert main(["tune", "plan.toml", "--seconds", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "0 other plans simulated; the time was over before all were tried, more has --seconds" in said


def test_the_plan_above_its_rows_is_tuned_and_a_row_by_its_name(
    plan: Path, guessed: Callable[[Scored], None], capsys: Capsys
) -> None:
    plan.write_text(TEXT + ROWS)
    guessed(by_prefetch)
    assert main(["tune", "plan.toml", "--write"]) == 0
    said = capsys.readouterr().out
    assert "this is the plan above its [[matrix]] rows; a row is tuned as plan.toml::ahead: ahead" in said
    assert plan.read_text() == (TEXT + ROWS).replace("prefetch = 0 ", "prefetch = 3 ")
    assert main(["tune", "plan.toml::ahead"]) == 0
    said = capsys.readouterr().out
    assert "\n-overlap.prefetch = 1\n+overlap.prefetch = 3\n" in said
    assert 'the keys of row "ahead" stand over those of the plan; write them there by hand' in said


def test_what_would_break_a_row_is_told_and_not_written(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    """The model's entries say so: a star stands in the plan."""
    row = '\n[[matrix]]\nid = "by_hand"\noverlap.launch_at.forward = { "layers.1" = "layers.0" }\n'
    plan.write_text(TEXT + row)
    guessed(lambda one: replace(by_prefetch(one), seconds=1e-6 if "layers.0" in str(one.bucket.plan) else 1.0))
    assert main(["tune", "plan.toml", "--write"]) == 1
    said = capsys.readouterr()
    breaks = 'a row would be no plan any more: plan.toml: [[matrix]] "by_hand": [overlap] launch_at.forward: '
    assert f"\n{breaks}" in said.out
    assert f"nothing is written: {breaks}" in said.err
    assert plan.read_text() == TEXT + row


def test_a_plan_whose_keys_cannot_be_found_is_told_and_not_written(
    plan: Path, guessed: Callable[[Scored], None], capsys: Capsys
) -> None:
    inline = "overlap = { prefetch = 0 }\n" + TEXT.partition("[overlap]")[0]
    plan.write_text(inline)
    guessed(by_prefetch)
    assert main(["tune", "plan.toml", "--write"]) == 1
    said = capsys.readouterr()
    assert "\n-overlap.prefetch = 0\n+overlap.prefetch = 3\n" in said.out
    assert "nothing is written: plan.toml: [overlap] prefetch stands in no line of its own" in said.err
    assert plan.read_text() == inline


def test_a_file_that_was_changed_meanwhile_is_left(plan: Path, guessed: Callable[[Scored], None], capsys: Capsys) -> None:
    def scored(one: Plan) -> SimulatedScore:
        plan.write_text(TEXT + "# mine\n")
        return by_prefetch(one)

    guessed(scored)
    assert main(["tune", "plan.toml", "--write"]) == 1
    assert "plan.toml was changed while the search ran, so nothing is written" in capsys.readouterr().err
    assert plan.read_text() == TEXT + "# mine\n"


BARE = TEXT[: TEXT.index("[cluster]")] + TEXT[TEXT.index("[bucket]") :]
GRAPH = '[graph]\nfactory = "m:g"\n[parallel]\ndp_shard = 2\n[bucket]\nplan = ["a"]\n'
NO_ENTRY = TEXT.replace('plan = ["tok_embeddings", "layers.*", "norm+output"]', "")


@pytest.mark.parametrize(
    ("text", "words", "status", "sentence"),
    [
        (BARE, [], 2, "plan.toml has no [cluster]; name one, as in --cluster h100-sxm"),
        (TEXT, ["--cluster", "h100"], 1, 'there is no preset "h100"; did you mean "h100-sxm"?'),
        (GRAPH, ["--cluster", "b200"], 2, "plan.toml has [graph], and what is searched is what a [model] traces"),
        (NO_ENTRY, [], 1, "plan.toml: [bucket] plan has no entry"),
        (TEXT.replace("layers.*", "layer.*"), [], 1, 'plan.toml: [bucket]: entry "layer.*": "layer" matches nothing'),
        (TEXT + ROWS, ["::ahead", "--write"], 2, '--write puts keys into the plan, and those of row "ahead" stand over it'),
        (TEXT, ["--seconds", "0"], 2, "--seconds 0: expected a number above 0"),
        (TEXT, ["--memory-gb", "-1"], 2, "--memory-gb -1: expected a number above 0"),
        (TEXT, ["--memory-gb", "inf"], 2, "--memory-gb inf: expected a finite number"),
        (TEXT, ["--memory-gb", "1e300"], 2, "--memory-gb 1e+300: expected a finite number"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_one_sentence(
    plan: Path, text: str, words: list[str], status: int, sentence: str, capsys: Capsys
) -> None:
    plan.write_text(text)
    row = "".join(word for word in words if word.startswith("::"))
    assert main(["tune", f"plan.toml{row}", *(word for word in words if not word.startswith("::"))]) == status
    said = capsys.readouterr()
    assert sentence in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_plan_without_a_cluster_is_tuned_on_one_that_is_named(
    plan: Path, guessed: Callable[[Scored], None], capsys: Capsys
) -> None:
    plan.write_text(BARE)
    guessed(by_prefetch)
    assert main(["tune", "plan.toml", "--cluster", "b200", "--world", "dp_shard=8", "--write"]) == 0
    assert "plan.toml: 8 ranks on b200" in capsys.readouterr().out
    assert plan.read_text() == BARE.replace("prefetch = 0", "prefetch = 3")
