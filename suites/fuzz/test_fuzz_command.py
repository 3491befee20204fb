"""``fxbucket fuzz`` from a folder of one's own, on passes that are broken in a known way: found, cut short, kept, mended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.fuzz import on_ranks, search
from pytest_fxbucket.fuzz.finds import KINDS
from pytest_fxbucket.fuzz.search import Search
from pytest_fxbucket.ranks.pools import Pools
from suites.docs.blocks import ROOT
from suites.fuzz.broken import BROKEN, HEAD, MENDED, SEVERAL
from suites.warm.runs import WarmRuns

PAGE = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8").partition("\n## fuzz\n")[2].partition("\n## ")[0]
Capsys = pytest.CaptureFixture[str]
SWALLOWS = """
import signal


def swallow():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
"""
LAUNCH = re.compile(r"made\.call\(torch\.ops\._c10d_functional\.(?!wait)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Pools) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pytest_fxbucket.ranks.pools.Pools", lambda: pools)
    monkeypatch.setattr(pools, "close", lambda: None)
    monkeypatch.setattr(on_ranks, "HANG_S", 3.0)
    monkeypatch.setattr(search, "_SHRINKING_S", 1.0)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.fixture
def fuzz(folder: Path, capsys: Capsys) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the command on a module ``mine``; gives its status and its document."""

    def run(text: str, *words: str) -> tuple[int, dict[str, Any]]:
        sys.modules.pop("mine", None)
        (folder / "mine.py").write_text(text)
        status = main(["fuzz", "--pass", "mine:broken", "--json", *words])
        return status, json.loads(capsys.readouterr().out)

    return run


def pytest_in(folder: Path, warm_runs: WarmRuns) -> tuple[int, str]:
    """pytest on the corpus, as a user runs it."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "fuzz-corpus"]
    done = warm_runs.run(words, folder, {**os.environ, "PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout


def test_each_kind_of_fault_is_found_small_and_its_test_is_red_until_the_pass_is_mended(
    fuzz: Callable[..., tuple[int, dict[str, Any]]], folder: Path, warm_runs: WarmRuns
) -> None:
    most = {"exception": 1, "would hang": 1, "wrong values": 1, "plan silently not kept": 2, "not idempotent": 1}
    for kind, text in BROKEN.items():
        corpus = f"fuzz-corpus/{kind.replace(' ', '_')}"
        status, found = fuzz(HEAD + text, "--seconds", "90", "--at-most", "1", "--corpus", corpus)
        assert (status, found["ended"], [one["kind"] for one in found["new"]]) == (1, "enough", [kind])
        (one,) = found["new"]
        assert len(LAUNCH.findall(one["test"])) <= most[kind], one["test"]
        assert set(re.findall(r"^(?:from|import) ([\w.]+)", one["test"], re.MULTILINE)) <= {
            "__future__",
            "operator",
            "torch",
            "pytest_fxbucket.fuzz",
        }
        path = folder / one["file"]
        text_of_file = path.read_text()
        assert text_of_file == one["test"]
        path.write_text(text_of_file.replace("mine:broken", f"broken_{KINDS.index(kind)}:broken"))
        (folder / f"broken_{KINDS.index(kind)}.py").write_text(HEAD + text)
        if kind == "would hang":
            assert one["real_ranks"].startswith("2 gloo ranks: ")
            assert "did not answer within 3 s" in one["real_ranks"]
        if kind == "wrong values":
            assert re.match(r"2 gloo ranks: rank \d: output \d differs in ", one["real_ranks"])

    status, said = pytest_in(folder, warm_runs)
    assert (status, "5 failed" in said) == (1, True), said
    for number in range(len(KINDS)):
        (folder / f"broken_{number}.py").write_text(MENDED)
    status, said = pytest_in(folder, warm_runs)
    assert (status, "5 passed" in said) == (0, True), said


def test_one_fault_does_not_hide_another_and_what_is_kept_is_tried_first(
    fuzz: Callable[..., tuple[int, dict[str, Any]]], folder: Path
) -> None:
    status, found = fuzz(SEVERAL, "--seconds", "90", "--at-most", "2")
    assert (status, {one["kind"] for one in found["new"]}) == (1, {"exception", "wrong values"})

    status, again = fuzz(SEVERAL, "--seconds", "0.001")
    assert (status, again["new"], again["tried"]) == (1, [], len(found["new"]))
    assert sorted(one["file"] for one in again["still_there"]) == sorted(one["file"] for one in found["new"])

    status, mended = fuzz(MENDED, "--seconds", "0.001")
    assert (status, mended["new"], mended["still_there"]) == (0, [], [])
    assert sorted(mended["mended"]) == sorted(one["file"] for one in found["new"])
    keys = {*found, *found["new"][0]}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()


@pytest.fixture
def breaks_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Run the command with something that happens once something is found; gives its status."""

    def run(happens: Callable[[], object]) -> int:
        (folder / "mine.py").write_text(HEAD + BROKEN["exception"])
        last = Search._last

        def then(self: Search, kind: str, *met: Any) -> str:
            if self.known:
                happens()
            return last(self, kind, *met)

        monkeypatch.setattr(Search, "_last", then)
        monkeypatch.setattr(search, "sweeps", lambda *_: iter(()))
        return main(["fuzz", "--pass", "mine:broken", "--seconds", "60"])

    return run


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_gives_what_was_found_so_far(
    breaks_off: Callable[[Callable[[], object]], int], folder: Path, capsys: Capsys
) -> None:
    assert breaks_off(lambda: signal.raise_signal(signal.SIGINT)) == 130
    said = capsys.readouterr()
    assert {path.name for path in folder.iterdir()} <= {"mine.py", "fuzz-corpus", "__pycache__"}
    (path,) = (folder / "fuzz-corpus").glob("*.py")
    assert path.read_text() in said.out
    assert f"new: fuzz-corpus/{path.name}: exception: KeyError in broken: " in said.out
    assert "1 new find, 0 of the corpus still there, 0 mended; stopped, this is what was found so far" in said.out
    assert "Traceback" not in said.err


def test_an_error_of_the_search_itself_loses_no_find(breaks_off: Callable[[Callable[[], object]], int], capsys: Capsys) -> None:
    assert breaks_off(lambda: 1 // 0) == 2
    said = capsys.readouterr()
    assert "new: fuzz-corpus/test_fuzz_exception_" in said.out
    assert "it broke then, and stderr says why" in said.out
    assert "ZeroDivisionError: integer division or modulo by zero" in said.err


@pytest.mark.usefixtures("ctrl_c")
def test_a_find_that_cannot_be_written_is_told_all_the_same(folder: Path, capsys: Capsys) -> None:
    Path("mine.py").write_text(HEAD + BROKEN["exception"])
    Path("fuzz-corpus").symlink_to("nowhere/corpus")
    assert main(["fuzz", "--pass", "mine:broken", "--seconds", "90"]) == 2
    told = capsys.readouterr()
    assert "from pytest_fxbucket.fuzz import Program, Trial, problem" in told.out
    assert re.search(r"^new: fuzz-corpus/test_fuzz_exception_\w+\.py: exception: ", told.out, re.MULTILINE)
    assert re.fullmatch(r"fxbucket: fuzz-corpus/\S+ cannot be written: File exists", told.err.splitlines()[-1])
    assert "Traceback" not in told.err
    assert "run them with" not in told.out


@pytest.mark.usefixtures("ctrl_c")
def test_a_ctrl_c_that_an_import_or_a_pass_swallows_ends_it_all_the_same(folder: Path, capsys: Capsys) -> None:
    passes = "broken = well\n", "\n\ndef broken(gm, plans):\n    swallow()\n    return well(gm, plans)\n"
    for text, where in zip((f"{SWALLOWS}{HEAD}swallow()\n{passes[0]}", f"{SWALLOWS}{HEAD}{passes[1]}"), (0, 1), strict=True):
        sys.modules.pop("mine", None)
        (folder / "mine.py").write_text(text)
        assert main(["fuzz", "--pass", "mine:broken", "--seconds", "5"]) == 130
        said = capsys.readouterr()
        assert f"{where} program{'' if where == 1 else 's'} tried; 0 new finds" in said.out
        assert "stopped, this is what was found so far" in said.out
        assert "Traceback" not in said.err


@pytest.mark.usefixtures("ctrl_c")
def test_a_ctrl_c_within_a_text_that_is_executed_gives_130_and_not_the_signal(folder: Path) -> None:
    """Python ends by the signal if KeyboardInterrupt has left such a text, though it was caught then."""
    (folder / "mine.py").write_text(f"import signal\nexec('signal.raise_signal(signal.SIGINT)')\n{MENDED}")
    command = [sys.executable, "-m", "pytest_fxbucket.cli", "fuzz", "--pass", "mine:broken", "--seconds", "5"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    assert "0 programs tried" in done.stdout


@pytest.mark.usefixtures("ctrl_c")
def test_a_ctrl_c_before_the_command_has_begun_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def interrupted(name: str) -> ModuleType:
        signal.raise_signal(signal.SIGINT)
        return import_module(name)

    monkeypatch.setattr("pytest_fxbucket.cli.__main__.import_module", interrupted)
    assert main(["fuzz", "--seconds", "5"]) == 130
    assert capsys.readouterr() == ("", "fxbucket: stopped\n")


def test_nothing_is_found_against_our_pass(folder: Path, capsys: Capsys) -> None:
    assert main(["fuzz", "--seconds", "1", "--seed", "7", "--ranks", "4"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    tried = re.fullmatch(r"manual: (\d+) programs tried; 0 new finds, 0 of the corpus still there, 0 mended\n", said)
    assert tried is not None
    assert int(tried[1]) > 0
    assert not (folder / "fuzz-corpus").exists()


def test_faults_of_torchs_manual_pass_are_found(folder: Path, capsys: Capsys) -> None:
    assert main(["fuzz", "--pass", "torch", "--seconds", "90", "--at-most", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["new"]
    assert {"exception", "plan silently not kept"} <= {one["kind"] for one in found}
    assert len({one["test"] for one in found}) == 3


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--pass", "mine"], 2, '--pass: "mine" is no pass; expected manual, torch or module:callable'),
        (["--pass", "nowhere:broken"], 2, 'pass nowhere:broken: there is no module "nowhere" in the folders on the path'),
        (["--pass", "mine:alone"], 2, "pass mine:alone cannot be called as (gm, plans): too many positional arguments"),
        (["--seconds", "0"], 2, "--seconds 0: expected a number above 0"),
        (["--seconds", "-5"], 2, "--seconds -5: expected a number above 0"),
        (["--seconds", "nan"], 2, "--seconds nan: expected a number above 0"),
        (["--at-most", "0"], 2, "--at-most 0: expected a number above 0"),
        (["--ranks", "1"], 2, "--ranks 1: expected a number above 1"),
        (["--ranks", "9"], 2, "--ranks 9: expected 2 to 8"),
        (["--pass", "mine:well", "--corpus", "mine.py"], 2, "mine.py cannot be read: Not a directory"),
        (["--pass", "mine:well", "--corpus", "old"], 2, "test_fuzz_old.py holds no trial: KeyError: 'trial'"),
    ],
)
def test_what_cannot_be_tried_is_told_in_one_sentence(
    folder: Path, words: list[str], status: int, sentence: str, capsys: Capsys
) -> None:
    (folder / "mine.py").write_text(f"{HEAD}\ndef alone(gm):\n    return gm\n")
    (folder / "old").mkdir()
    (folder / "old" / "test_fuzz_old.py").write_text("KIND = 1\n")
    assert main(["fuzz", *words]) == status
    said = capsys.readouterr()
    assert sentence in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_hypothesis_is_asked_for_where_it_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr("pytest_fxbucket.cli.fuzz.find_spec", lambda name: None)
    assert main(["fuzz"]) == 2
    assert "fxbucket fuzz needs hypothesis: pip install 'pytest-fxbucket[fuzz]'" in capsys.readouterr().err
