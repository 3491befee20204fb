"""``fxbucket diff --at``: a commit's side is that of the commit, and nothing of the user's repository is touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.golden.store import render
from suites.cli.small_repository import BODY, OTHER_PLAN, PLAN, SHOWN, SmallRepository, command, environment
from suites.pytest_plugin.processes import ends

Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]


def test_plan_model_and_pass_are_those_of_the_commit_and_nothing_is_touched(
    repository: SmallRepository, untouched: None, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a subfolder, with uncommitted changes, staged and not."""
    own = "from fixtures.models import traced\nfrom pytest_fxbucket.passes import manual_overlap_bucketing as ours\n"
    repository.write("src/net_at.py", own + "def step():\n    return traced.step()\ndef run(gm, plans):\n    return gm\n")
    plan = PLAN.replace("fixtures.models.traced", "net_at")
    repository.commit(plans__plan=plan)
    repository.write(
        "src/net_at.py", own + "def step():\n    raise ValueError('now')\ndef run(gm, plans):\n    return ours(gm, plans)\n"
    )
    repository.commit(plans__plan=plan)
    repository.write("plans/plan.toml", "no plan")
    repository.git("add", "plans")
    repository.write("plans/plan.toml", PLAN)
    repository.write("new.txt", "")
    before = repository.state()
    monkeypatch.chdir(repository.top / "plans")
    monkeypatch.syspath_prepend(str(repository.top / "src"))  # as an editable install does
    assert main(["diff", "plan.toml", "--pass", "net_at:run", "--pass", "manual", "--at", "main~1"]) == 1
    out = capsys.readouterr().out
    assert "--- plan.toml at main~1" in out.replace("plans/", "")
    assert "bucket" in out.partition("---")[0]
    assert repository.state() == before


def test_two_commits_are_compared_and_a_schedule_that_is_the_same_is_said_to_be(
    repository: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    repository.stub(SHOWN)
    repository.write("shown.txt", render("plan plan.toml\n" + BODY))
    first = repository.commit(plan=PLAN)
    repository.write("shown.txt", render("plan plan.toml\n" + BODY + "  wait    all_gather layers.0\n"))
    repository.commit()
    repository.git("tag", "one", first)
    repository.git("mv", "plan.toml", "moved.toml")
    assert main(["diff", "plan.toml", "--at", "one", "--at", "HEAD"]) == 1
    out = capsys.readouterr().out
    assert f"--- plan.toml at one ({first[:7]})\n" in out
    assert out.endswith("+  wait    all_gather layers.0\n")
    assert not list(repository.top.glob(".fxbucket/*/*")), "a short diff needs no file"
    repository.write("shown.txt", render("plan moved.toml\n" + BODY))
    repository.commit()
    assert main(["diff", "plan.toml", "moved.toml", "--at", "one", "--at", "HEAD"]) == 0
    assert capsys.readouterr().out == "same\n"


def test_in_a_hook_of_a_linked_worktree_the_commit_is_that_of_the_plan_s_repository(
    repository: SmallRepository, tmp_path: Path
) -> None:
    """Git tells its hooks of an index and a folder that are not those of the commit's side."""
    repository.stub(
        'sys.exit(f\'fxbucket: {Path.cwd().name[:7]} {os.environ.keys() & {"GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"}}\')'
    )
    repository.commit(plan=PLAN)
    linked = tmp_path / "linked"
    repository.git("worktree", "add", "-q", str(linked))
    words = " ".join(command("diff", "plan.toml", "--at", "HEAD"))
    hook = repository.write(
        ".git/hooks/pre-commit", f"#!/bin/sh\nenv | grep ^GIT_INDEX_FILE\ncd {linked}\n{words}\necho status $?\n"
    )
    hook.chmod(0o755)
    (linked / "plan.toml").write_text(OTHER_PLAN)
    done = subprocess.run(
        ["git", "commit", "-q", "-m", "x", "plan.toml"], cwd=linked, env=environment(), capture_output=True, text=True
    )
    assert "GIT_INDEX_FILE=" in done.stderr + done.stdout
    assert "): linked- set()\n" in done.stderr, done.stderr
    assert "status 2" in done.stderr + done.stdout
    assert repository.git("worktree", "list").count("\n") == 2
    assert done.returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_leaves_no_worktree_no_process_and_no_file(
    repository: SmallRepository, untouched: None, tmp_path: Path, number: int, status: int
) -> None:
    waiting = tmp_path / "waiting"
    os.mkfifo(waiting)
    repository.stub(
        f"import signal\nfile = open({str(waiting)!r}, 'w')\nprint(os.getpid(), file=file, flush=True)\nsignal.pause()\n"
    )
    repository.commit(plan=PLAN)
    before = repository.state()
    process = subprocess.Popen(command("diff", "plan.toml", "--at", "HEAD"), cwd=repository.top, env=environment())
    with open(waiting) as file:
        child = int(file.readline())
        assert repository.git("worktree", "list").count("\n") == 2
        os.kill(process.pid, number)
        assert process.wait(timeout=30) == status
        assert ends(child, limit_s=0)
    assert repository.state() == before


@pytest.mark.parametrize("meanwhile", ["worktree add", "worktree list", "worktree remove"])
def test_a_signal_while_git_makes_or_removes_the_worktree_leaves_none(
    repository: SmallRepository, untouched: None, tmp_path: Path, meanwhile: str
) -> None:
    """A git that sends one to who called it."""
    repository.stub(SHOWN)
    repository.write("shown.txt", render("plan x\n" + BODY))
    repository.commit(plan=PLAN)
    repository.commit()
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    real = shutil.which("git")
    shim.write_text(f'#!/bin/sh\ncase "$*" in *"{meanwhile}"*) kill -TERM $PPID;; esac\nexec {real} "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    words = command("diff", "plan.toml", "--at", "HEAD~1", "--at", "HEAD")
    done = subprocess.run(words, cwd=repository.top, env=environment(PATH=path), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")


def test_the_commit_s_own_pytest_fxbucket_is_run_in_the_same_subfolder_without_git_s_settings(
    repository: SmallRepository, untouched: None, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.stub(
        "sys.stdout.write(Path('../shown.txt').read_text())\n"
        "assert sys.argv[2:] == ['plan.toml::row', '--pass', 'manual'], sys.argv\n"
    )
    repository.write("shown.txt", render("plan x\n" + BODY))
    repository.commit(plans__plan=PLAN)
    monkeypatch.chdir(repository.top / "plans")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere")
    assert main(["diff", "plan.toml::row", "other.toml::row", "--at", "HEAD", "--at", "HEAD"]) == 2
    assert "plans/other.toml is not in HEAD" in capsys.readouterr().err
    repository.commit(plans__other=PLAN, plans__plan=PLAN)
    repository.write("pytest_fxbucket/cli/__main__.py", "raise ValueError('of the working tree')")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", f"{repository.top}")
    assert main(["diff", "plan.toml::row", "--at", "HEAD", "--at", "HEAD~1"]) == 0
    assert capsys.readouterr().out == "same\n"


@pytest.mark.parametrize(
    ("show", "says"),
    [
        (
            "raise ValueError('a model that breaks')",
            "at HEAD ({sha}): fxbucket show ended with status 1: ValueError: a model that breaks",
        ),
        ("os.kill(os.getpid(), 9)", "at HEAD ({sha}): fxbucket show ended by signal 9"),
        ("sys.exit(f'fxbucket: {{Path.cwd()}}/plan.toml: no key \"x\"')", 'at HEAD ({sha}): plan.toml: no key "x"'),
        ("print('# fxbucket golden 0')", "at HEAD ({sha}): the pytest_fxbucket there writes goldens of another format"),
        ("import argparse; argparse.ArgumentParser().add_argument('c', choices=['init'])", ""),
    ],
)
def test_what_fails_at_a_commit_is_one_sentence_that_names_it(
    repository: SmallRepository, untouched: None, refused: Refused, show: str, says: str
) -> None:
    if not says:
        show = "import argparse; p = argparse.ArgumentParser(); p.add_argument('command', choices=['init']); p.parse_args()"
        says = "at HEAD ({sha}): the pytest_fxbucket there has no command show"
    repository.stub(show.replace("{{", "{").replace("}}", "}"))
    sha = repository.commit(plan=PLAN)
    refused(["diff", "plan.toml", "--at", "HEAD"], 2, says.format(sha=sha[:7]))


def test_a_plan_that_is_none_at_a_commit_says_so_in_its_own_words(
    repository: SmallRepository, untouched: None, refused: Refused
) -> None:
    sha = repository.commit(plan="no plan")
    repository.write("plan.toml", PLAN)
    refused(["diff", "plan.toml", "--at", "HEAD"], 2, f"fxbucket: at HEAD ({sha[:7]}): plan.toml:1: this is not TOML: ")


def test_what_is_imported_from_the_working_tree_after_all_is_refused(
    repository: SmallRepository, untouched: None, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a package that is installed in place is, where the commit lacks it."""
    repository.stub(f"import late_at\n{SHOWN}")
    repository.write("shown.txt", render("plan x\n" + BODY))
    repository.commit(plan=PLAN)
    repository.write("lib/late_at.py", "")
    repository.commit()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(repository.top / 'lib')!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert main(["diff", "plan.toml", "--at", "HEAD~1"]) == 2
    assert "at HEAD~1 (" in (err := capsys.readouterr().err)
    assert "lib/late_at.py was imported from the working tree" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan.toml", "--at", "mian"], '--at mian is no commit of {top}; did you mean "main"?'),
        (["plan.toml", "--at", "v1.1~2"], 'did you mean "v1.0"?'),
        (["plan.toml", "--at", "main~9"], "--at main~9 is no commit of {top}; main is there, but not that far back\n"),
        (["plan.toml", "--at", "zzz"], "--at zzz is no commit of {top}\n"),
        (["plan.toml", "--at", ""], "write what git calls one, such as main, HEAD~1 or v1.0"),
        (["plan.toml", "--at=-x"], '--at "-x" names no commit'),
        (["plan.toml", "--at", "v1.0", "--at", "v1.0"], "there is nothing to compare: both sides are plan.toml at v1.0"),
        (["plan.toml", "--at", "a", "--at", "b", "--at", "c"], "--at is given 3 times, and there are two sides"),
        (
            ["moved.toml", "--at", "v1.0"],
            "moved.toml is not in v1.0 ({sha}), where it is called was.toml: give that as the first",
        ),
        (["plans/plan.toml", "--at", "v1.0"], 'plans/plan.toml is not in v1.0 ({sha}); did you mean "plan.toml"?'),
        (["plam.toml", "--at", "v1.0"], 'plam.toml is not in v1.0 ({sha}); did you mean "plan.toml"?'),
        (["none/zzzzzzzz.toml", "--at", "v1.0"], "none/zzzzzzzz.toml is not in v1.0 ({sha})\n"),
        (["{top}/../elsewhere.toml", "--at", "v1.0"], "is in no git working tree, so --at has no commits to look in\n"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    repository: SmallRepository, untouched: None, refused: Refused, words: list[str], says: str
) -> None:
    sha = repository.commit(plan=PLAN, was=OTHER_PLAN)
    repository.git("tag", "v1.0")
    repository.git("mv", "was.toml", "moved.toml")
    asked = [word.format(top=repository.top) for word in words]
    assert refused(["diff", *asked], 2, says.format(top=repository.top, sha=sha[:7])).count("\n") == 1


def test_without_git_it_is_said(repository: SmallRepository, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    refused(["diff", "plan.toml", "--at", "HEAD"], 2, "--at needs git, and there is no git on PATH")
