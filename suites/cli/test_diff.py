"""``fxbucket diff`` of two plans or two passes: words, then the text, and a status that scripts can trust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from suites.cli.small_repository import OTHER_PLAN, PLAN

Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]
OWN = """
from fixtures.models import traced
{before}
def step():
    return traced.step()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two plans of one step with other buckets, and one that differs by nothing that a schedule has."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": PLAN, "b": OTHER_PLAN, "c": PLAN + "[run]\nseed = 1\n"}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_two_plans_are_compared_in_words_then_in_text(project: Path, capsys: Capsys) -> None:
    assert main(["diff", "a.toml", "b.toml"]) == 1
    said = capsys.readouterr()
    words, _, diff = said.out.partition("\n\n")
    assert words.startswith("what changed:\n")
    assert "layers.1+layers.2" in words
    assert diff.startswith("--- a.toml\n+++ b.toml\n@@")
    assert "plan " not in diff, "another name is no other schedule"
    assert said.err == ""


def test_a_long_diff_is_cut_and_the_whole_is_in_a_file_that_git_ignores(project: Path, capsys: Capsys) -> None:
    assert main(["diff", "b.toml", "a.toml"]) == 1
    (path,) = project.glob(".fxbucket/**/*.diff")
    assert (project / ".fxbucket/.gitignore").read_text() == "*\n"
    out = capsys.readouterr().out
    assert out.endswith(f"all in {path}\n")
    shown = out.partition("--- b.toml")[2].splitlines()[1:-1]
    assert len(shown) == 59, "with the line that names the first side"
    assert set(shown) < set(path.read_text().splitlines())
    assert len(out.splitlines()) < 130


def test_a_folder_that_cannot_be_written_puts_the_file_elsewhere(
    project: Path, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (project / ".fxbucket").write_text("in the way")
    assert main(["diff", "b.toml", "a.toml"]) == 1
    (whole,) = temporary.rglob("whole.diff")
    assert capsys.readouterr().out.endswith(f"more lines of diff, all in {whole}\n")


def test_the_same_schedule_is_said_to_be_the_same_and_leaves_no_file(project: Path, capsys: Capsys) -> None:
    assert main(["diff", "a.toml", "c.toml"]) == 0
    assert capsys.readouterr().out == "same\n"
    assert not (project / ".fxbucket").exists()


def test_two_passes_are_compared_and_named(project: Path, capsys: Capsys) -> None:
    passes = ["--pass", "manual", "--pass", "suites.cli.explain_steps:merges_nothing"]
    assert main(["diff", "a.toml", *passes]) == 1
    assert "--- a.toml by pass manual\n+++ a.toml by pass suites.cli.explain_steps:merges_nothing\n" in capsys.readouterr().out
    assert main(["diff", "a.toml", "c.toml", *passes[2:]]) == 0, "one pass is for both sides"
    assert capsys.readouterr().out == "same\n"


def test_rows_are_compared(project: Path, capsys: Capsys) -> None:
    row = '[[matrix]]\nid = "small"\nbucket.plan = ["layers.0", "layers.[1-2]"]\noverlap.prefetch = 0\n'
    (project / "a.toml").write_text(PLAN + row)
    assert main(["diff", "a.toml", "a.toml::small"]) == 1
    assert "--- a.toml\n+++ a.toml::small\n" in capsys.readouterr().out


def test_modules_of_one_name_in_two_folders_are_each_their_own(project: Path, refused: Refused) -> None:
    for name, before in {"one": "", "two": "raise ValueError('the second')"}.items():
        (project / name).mkdir()
        (project / name / "same_name.py").write_text(OWN.format(before=before))
        (project / name / "plan.toml").write_text(PLAN.replace("fixtures.models.traced", "same_name"))
    says = 'two/plan.toml: [graph] factory: importing "same_name" raised ValueError: the second'
    refused(["diff", "one/plan.toml", "two/plan.toml"], 2, says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["a.toml"],
            "there is nothing to compare: both sides are a.toml by pass manual; give a second plan, --pass twice, or --at",
        ),
        (["a.toml", "./a.toml", "--pass", "torch"], "there is nothing to compare: both sides are a.toml by pass torch"),
        (["a.toml", "--pass", "manual", "--pass", "manual"], "there is nothing to compare"),
        (["a.toml", "--pass", "a:b", "--pass", "a:b", "--pass", "a:b"], "--pass is given 3 times, and there are two sides"),
        (
            ["a.toml", "--pass", "manul"],
            '--pass: "manul" is no pass; expected manual, torch or module:callable; did you mean "manual"?',
        ),
        (["a.toml", "none.toml"], "none.toml is not there"),
        (["a.toml", "b.toml::row"], 'b.toml has no [[matrix]] row "row"; it has no rows'),
        (["a.toml", "b.toml", "--pass", "none:pass"], 'pass none:pass: there is no module "none"'),
        ([], "arguments are required: A[::ROW]"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_never_status_1(
    project: Path, refused: Refused, words: list[str], says: str
) -> None:
    refused(["diff", *words], 2, says)


def test_what_nobody_foresaw_is_a_traceback_and_not_taken_for_a_difference(
    project: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_fxbucket.cli.diff.without_name", lambda text: 1 / 0)
    assert main(["diff", "a.toml", "b.toml"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
