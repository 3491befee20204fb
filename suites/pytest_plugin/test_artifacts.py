"""One folder that several processes share: one writes and empties it, the others touch nothing but their own log."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import pytest

from pytest_fxbucket.artifacts import Folder, why_elsewhere
from pytest_fxbucket.checks.verdict import failed
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.pytest_plugin.terminal import failure_lines
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.glob("*"))


def test_who_writes_a_log_alone_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    whole, log = Folder(tmp_path, "plans/a.toml", "bitwise"), Folder(tmp_path, "plans/a.toml", "bitwise", "node1.rank3")
    whole.make()
    whole.write("settings.txt", "x")
    (log.path / "node1.rank3.log").touch()
    (log.path / "node0.rank1.log").touch()
    log.make()
    assert names(whole.path) == ["node0.rank1.log", "settings.txt"]
    log.write("settings.txt", "another")
    log.write_graphs(cast(Any, None), {})
    log.clear()
    assert (whole.path / "settings.txt").read_text() == "x\n"
    whole.make()
    assert names(whole.path) == []
    log.clear()
    assert not whole.path.exists()
    log.clear()


def test_where_it_is_alone_on_its_machine_it_makes_the_folder(tmp_path: Path) -> None:
    log = Folder(tmp_path / "artifacts", "plans/a.toml", "bitwise", "node1.rank3")
    assert log.make().is_dir()
    assert (tmp_path / "artifacts").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("log_of", [None, "node1.rank3"])
def test_what_another_process_clears_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_of: str | None
) -> None:
    """rank 0's log lay in a temporary folder now and then, where a process that began late cleared the folder for itself."""
    probe, others = (
        tempfile.TemporaryFile,
        [Folder(tmp_path, "plans/a.toml", "bitwise", f"node0.rank{rank}") for rank in (1, 2)],
    )

    def cleared_before(dir: Path) -> IO[bytes]:
        while others:
            others.pop().clear()
        return probe(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", cleared_before)
    made = Folder(tmp_path, "plans/a.toml", "bitwise", log_of).make()
    assert made.is_relative_to(tmp_path)
    assert made.is_dir()


def test_no_two_plans_share_a_folder_and_no_name_is_too_long(tmp_path: Path) -> None:
    """What one plan's failure left was removed by the other."""
    names = [
        "a b.toml",
        "a-b.toml",
        "a/b.toml",
        "plans/a-b.toml",
        "plans-a-b.toml",
        "../a-b.toml",
        "ü.toml",
        "é.toml",
        "..",
        ".",
    ]
    names += [
        unicodedata.normalize("NFD", "é.toml"),
        "x" * 300 + "/a.toml",
        "x" * 300 + "/b.toml",
        "a.toml[b]",
        "a.toml b",
        "a.toml-b",
    ]
    folders = [Folder(tmp_path, name, "audit").make() for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder.is_dir() and folder.parent.parent == tmp_path for folder in folders)
    assert Folder(tmp_path, "a" * 300, "b" * 300).make().is_dir()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def read_only(self: Path, *args: object, **kwargs: object) -> None:
    raise OSError(30, "Read-only file system", str(self))


def test_where_the_checkout_may_not_be_written_to_a_temporary_folder_is_used_and_said(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkout" / ".fxbucket"
    mkdir = Path.mkdir
    # Whoever runs the tests may be allowed to write anywhere.
    monkeypatch.setattr(
        Path, "mkdir", lambda path, *a, **k: (read_only if path.is_relative_to(root.parent) else mkdir)(path, *a, **k)
    )
    folder = Folder(root, "a.toml", "bitwise")
    folder.clear()
    made = folder.make()
    folder.write("settings.txt", "x")
    assert made.is_relative_to(temporary)
    assert made == folder.path
    assert (made / "settings.txt").read_text() == "x\n"
    assert why_elsewhere(made) == f"since {root} cannot be used: Read-only file system"
    assert why_elsewhere(tmp_path) == ""
    again = Folder(root, "b.toml", "audit").make()
    assert again.parent.parent == made.parent.parent, "one temporary folder for all plans"
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o777
    assert made.parent.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("level", [".fxbucket", ".fxbucket/a.toml", ".fxbucket/a.toml/audit"])
def test_a_link_is_not_followed_and_what_it_leads_to_stays(tmp_path: Path, temporary: Path, level: str) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "a.toml" / "audit").mkdir(parents=True)
    (theirs / "audit").mkdir()
    files = [theirs / "kept.txt", theirs / "a.toml" / "audit" / "kept.txt", theirs / "audit" / "kept.txt"]
    for file in files:
        file.write_text("mine")
    link = tmp_path / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(theirs, target_is_directory=True)
    folder = Folder(tmp_path / ".fxbucket", "a.toml", "audit")
    folder.clear()
    made = folder.make()
    folder.write("settings.txt", "x")
    folder.clear()
    assert made.is_relative_to(temporary)
    assert "is a link" in why_elsewhere(made)
    assert sorted(path for path in theirs.rglob("*") if path.is_file()) == sorted(files)
    assert link.is_symlink()


def test_a_file_of_that_name_stays_and_the_folder_lies_elsewhere(tmp_path: Path, temporary: Path) -> None:
    root = tmp_path / ".fxbucket"
    root.write_text("mine")
    assert Folder(root, "a.toml", "audit").make().is_relative_to(temporary)
    assert root.read_text() == "mine"


def test_a_temporary_folder_goes_unless_there_is_something_to_look_at(tmp_path: Path) -> None:
    (tmp_path / ".fxbucket").write_text("mine")
    (tmp_path / "tmp").mkdir()
    made = (
        "from pathlib import Path; from pytest_fxbucket.artifacts import Folder; f = Folder(Path('.fxbucket'), '{}', 'audit')"
    )
    for name, then in (("green", "f.make(); f.clear()"), ("red", "f.write('report.txt', 'x')")):
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        subprocess.run([sys.executable, "-c", f"{made.format(name)}; {then}"], cwd=tmp_path, env=environment, check=True)
    (left,) = (tmp_path / "tmp").iterdir()
    assert [path.name for path in left.rglob("*.txt")] == ["report.txt"]


def test_a_failure_says_where_its_files_are_and_why_there(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / ".fxbucket").write_text("mine")
    made = Folder(tmp_path / ".fxbucket", "a.toml", "audit").make()
    said = list(failure_lines(replace(failed("audit", "one promise not kept", ["a"]), folder=made)))
    assert said[-1] == f"graphs, report and rank logs: {made} (since {tmp_path}/.fxbucket cannot be used: File exists)"


def test_a_bitwise_is_green_where_nothing_can_be_left(
    project: pytest.Pytester, temporary: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project.path)
    Path(".fxbucket").symlink_to("/nowhere")
    settings = RunSettings(project.path, project.path / "golden", project.path / ".fxbucket")
    assert PlanRun(load_plans(project.path / "plans/plain.toml")[0], settings, pools).check("bitwise")
