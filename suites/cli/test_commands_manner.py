"""How every command behaves: users' modules that end the process, readers that leave, help that comes at once."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.cli.common import checking, status_of
from suites.cli.small_repository import ROOT, environment
from suites.warm.runs import WarmRuns

Refused = Callable[[list[str], int, str], str]
TRACED = str(ROOT / "fixtures/plans/traced.toml")
PLAN = '[graph]\nfactory = "ends:step"\n[parallel]\ndp_shard = 4\n[bucket]\nplan = ["layers"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans below two folders, each with a module `ends` that ends its process when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ends", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.toml").write_text(PLAN)
        (tmp_path / name / "ends.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path / "a")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["show", "a/plan.toml"], 1),
        (["explain", "a/plan.toml"], 1),
        (["init", "ends:step"], 1),
        (["diff", "a/plan.toml", "b/plan.toml"], 2),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_module_that_ends_the_process_is_no_success(folder: Path, refused: Refused, words: list[str], status: int) -> None:
    refused(words, status, 'importing "ends" raised SystemExit: 0')


def test_a_side_in_a_process_of_its_own_that_ends_is_no_success(folder: Path, refused: Refused) -> None:
    """Both sides came out empty once, which was the same."""
    for name in ("a", "b"):
        (folder / name / "ends.py").write_text("import os\nos.kill(os.getpid(), 15)\n")
    copy = folder / "a" / "copy.toml"
    copy.write_text((ROOT / "fixtures/plans/traced.toml").read_text())
    refused(["diff", str(copy), "b/plan.toml"], 2, "fxbucket show ended")


def test_who_reads_no_further_gets_no_traceback(tmp_path: Path, warm_runs: WarmRuns) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head` has done by then
    with open(write, "w") as out, open(os.memfd_create("err"), "w+") as err:
        words = ["-m", "pytest_fxbucket.cli", "show", TRACED]
        assert warm_runs.start(words, tmp_path, environment(), out, err).wait() == 141
        err.seek(0)
        said = err.read()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_who_reads_no_further_is_no_comparison_that_failed() -> None:
    def unread() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        status_of(unread, 2)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom pytest_fxbucket.cli.__main__ import COMMANDS, main\n"
        "for name in COMMANDS:\n    assert main([name, '--help']) == 0\n    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SAYS = "from pytest_fxbucket.cli.output import written\nraise SystemExit(written(lambda: print('n\u00fc.toml') or 0))"


@pytest.mark.parametrize(
    ("words", "shell", "status", "out", "err"),
    [
        ([SAYS], "PYTHONIOENCODING=ascii", 0, "n\\xfc.toml\n", ""),
        ([SAYS], ">&-", 0, "", ""),
        ([SAYS], ">/dev/full", 2, "", "fxbucket: what it says cannot be written: No space left on device\n"),
        ([SAYS], "2>&- >/dev/full", 2, "", ""),
        (["--help"], "| true", 141, "", ""),
        (["--version"], "| true", 141, "", ""),
        (["show", "--help"], ">/dev/full", 2, "", "fxbucket: what it says cannot be written: No space left on device\n"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() and " " not in value else "",
)
def test_words_that_cannot_be_written_are_no_traceback(
    tmp_path: Path, words: list[str], shell: str, status: int, out: str, err: str
) -> None:
    command = ["-c", *words] if words == [SAYS] else ["-m", "pytest_fxbucket.cli", *words]
    # A pipe's reader has left before the command writes: it waits for that.
    waits = f"{{ sleep 0; while [ -e {tmp_path}/reads ]; do :; done; " if "|" in shell else "{ "
    (tmp_path / "reads").touch()
    run, _, reader = shell.partition("| true")
    before, after = (f"{run} ", "") if "=" in run else ("", f" {run}")
    piped = f" | rm {tmp_path}/reads" if "|" in shell else ""
    script = f"set -o pipefail; {waits}{before}{shlex.join([sys.executable, *command])}{after}; }}{piped}{reader}"
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("plans/a.toml", "pytest --fxbucket-plans=plans/a.toml"),
        ("my plans/a.toml", "pytest '--fxbucket-plans=my plans/a.toml'"),
        ("a,b.toml", "pytest a,b.toml"),
    ],
)
def test_the_command_that_checks_a_plan_can_be_typed_as_it_is_printed(path: str, command: str) -> None:
    assert checking(Path(path)) == command
