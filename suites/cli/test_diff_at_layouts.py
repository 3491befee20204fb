"""``fxbucket diff --at`` in repositories that are not plain: nobody's hook runs, and no server is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.golden.store import render
from suites.cli.small_repository import BODY, PLAN, SHOWN, SmallRepository

Capsys = pytest.CaptureFixture[str]
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
