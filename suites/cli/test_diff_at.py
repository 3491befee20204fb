"""``fxbucket diff --at``: a commit's side is that of the commit, and nothing of the user's repository is touched.

Also in repositories that are not plain: nobody's hook runs, and no server is asked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.commit import stoppable
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


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
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


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_whoever_started_it_ignores_is_ignored(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with stoppable():
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_IGN


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
    repository.stub("sys.stdout.write(Path('../shown.txt').read_text())\nassert sys.argv[2:] == ['plan.toml::row'], sys.argv\n")
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


SAME = ["diff", "plan.toml", "--at", "HEAD~1", "--at", "HEAD"]


@pytest.fixture
def shown(repository: SmallRepository) -> SmallRepository:
    """Two commits whose own ``show`` prints the same golden."""
    repository.stub(SHOWN)
    repository.write("shown.txt", render("plan x\n" + BODY))
    repository.commit(plan=PLAN)
    repository.commit()
    return repository


def test_no_hook_of_the_user_s_runs(shown: SmallRepository, untouched: None, capsys: Capsys) -> None:
    hook = shown.write(".git/hooks/post-checkout", f"#!/bin/sh\ntouch {shown.top}/hooked\n")
    hook.chmod(0o755)
    shown.git("checkout", "-q", "main")
    assert (shown.top / "hooked").exists(), "git runs it"
    (shown.top / "hooked").unlink()
    assert main(SAME) == 0
    assert not (shown.top / "hooked").exists()


def test_a_tree_of_which_the_user_has_a_part_is_whole_at_a_commit(
    shown: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    shown.write("away/helper.py", "")
    shown.write(
        "pytest_fxbucket/cli/__main__.py", "import sys; sys.path.insert(0, 'away'); import helper; raise SystemExit('seen')"
    )
    shown.commit()
    shown.git("sparse-checkout", "set", "pytest_fxbucket")
    assert not (shown.top / "away").exists()
    assert main(["diff", "plan.toml", "--at", "HEAD"]) == 2
    assert capsys.readouterr().err.endswith(": seen\n")


def test_temporary_files_are_put_outside_the_repository(
    shown: SmallRepository, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the settings of the working tree would count for the commit too."""
    (shown.top / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(shown.top / "tmp"))
    shown.write("pytest_fxbucket/cli/__main__.py", "import os; raise SystemExit(os.getcwd())")
    shown.commit()
    assert main(["diff", "plan.toml", "--at", "HEAD"]) == 2
    place = Path(capsys.readouterr().err.split()[-1])
    assert not place.is_relative_to(shown.top)
    assert not place.exists()


def test_files_whose_repository_lies_elsewhere_are_found_by_git_s_settings(
    shown: SmallRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    shutil.move(shown.top / ".git", tmp_path / "kept.git")
    monkeypatch.setenv("GIT_DIR", "../kept.git")
    monkeypatch.setenv("GIT_WORK_TREE", ".")
    assert main(SAME) == 0
    assert capsys.readouterr().out == "same\n"
    assert list((tmp_path / "kept.git" / "worktrees").glob("*")) == []
    monkeypatch.delenv("GIT_DIR")
    assert main(SAME) == 2
    assert "is in no git working tree" in capsys.readouterr().err


def test_a_hook_of_another_repository_leaves_both_alone(
    shown: SmallRepository, untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    other = SmallRepository(tmp_path / "other")
    other.commit()
    before = other.state()
    monkeypatch.setenv("GIT_DIR", str(other.top / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.top / ".git" / "index"))
    assert main(SAME) == 0
    assert other.state() == before


def test_a_plan_in_a_submodule_is_compared_with_commits_of_that(
    shown: SmallRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    outer = SmallRepository(tmp_path / "outer")
    outer.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(shown.top), "inner")
    outer.commit()
    monkeypatch.chdir(outer.top / "inner")
    assert main(SAME) == 0
    assert outer.git("status", "--porcelain") == ""
    assert outer.git("-C", "inner", "worktree", "list").count("\n") == 1


def test_a_module_in_a_submodule_is_not_taken_from_the_working_tree(
    shown: SmallRepository, untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    inner = SmallRepository(tmp_path / "inner")
    inner.write("from_inner.py", "")
    inner.commit()
    shown.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner.top), "inner")
    shown.stub(f"import from_inner\n{SHOWN}")
    shown.commit()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(shown.top / 'inner')!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    assert main(["diff", "plan.toml", "--at", "HEAD"]) == 2
    assert "inner/from_inner.py was imported from the working tree: the commit lacks it, or has it in a submodule" in (
        capsys.readouterr().err
    )


def test_a_clone_that_has_not_all_commits_says_how_to_get_them_and_asks_no_server(
    shown: SmallRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{shown.top}", str(tmp_path / "shallow")], check=True)
    monkeypatch.chdir(tmp_path / "shallow")
    assert main(SAME) == 2
    assert "this clone is shallow, and git fetch --unshallow gets the rest\n" in capsys.readouterr().err


def test_what_a_clone_has_left_on_its_server_is_an_error_and_not_fetched(
    shown: SmallRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    shown.write("plan.toml", PLAN + "# now\n")
    shown.commit()
    shown.git("config", "uploadpack.allowFilter", "true")
    shown.git("config", "uploadpack.allowAnySHA1InWant", "true")
    subprocess.run(["git", "clone", "-q", "--filter=blob:none", f"file://{shown.top}", str(tmp_path / "partial")], check=True)
    monkeypatch.chdir(tmp_path / "partial")
    assert main(["diff", "plan.toml", "--at", "HEAD~1"]) == 2
    assert "git worktree failed" in capsys.readouterr().err
    there = subprocess.run(["git", "worktree", "list"], cwd=tmp_path / "partial", capture_output=True, text=True, check=True)
    assert there.stdout.count("\n") == 1


def test_a_repository_that_git_does_not_trust_is_told_in_git_s_words(
    shown: SmallRepository, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("HOME", os.devnull)
    assert main(SAME) == 2
    assert "so --at has no commits to look in: detected dubious ownership in repository" in capsys.readouterr().err
