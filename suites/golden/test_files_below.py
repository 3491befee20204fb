"""What lies below a folder of goldens is listed, whatever of it may be looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fxbucket.files import Snapshot, files_below, plans_below
from pytest_fxbucket.golden.accept import goldens_below

NOBODY = 65534


@pytest.fixture
def readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose subfolder may be listed and not entered, as its path from where we are: root would enter it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("golden")
    (tmp_path / "sub").chmod(0o444)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    yield Path()
    if is_root:
        os.seteuid(0)
    (tmp_path / "sub").chmod(0o755)


def test_a_folder_that_may_not_be_entered_is_listed(readable: Path) -> None:
    assert files_below(readable) == [Path("sub/a.txt")]
    assert Snapshot.of(readable).digests == {Path("sub/a.txt"): "Permission denied"}
    assert goldens_below(readable) == []


def test_links_are_given_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("golden")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "root").symlink_to(".")
    assert [str(path.relative_to(tmp_path)) for path in files_below(tmp_path)] == ["folder", "gone", "real/a.txt", "root"]
    assert files_below(tmp_path / "root")[2] == tmp_path / "root/real/a.txt"


def test_plans_of_linked_folders_are_found_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "plans" / "own").mkdir(parents=True)
    for name in ("elsewhere/deep/a.toml", "elsewhere/notes.txt", "plans/own/b.toml", "plans/c.toml"):
        (tmp_path / name).write_text("")
    (tmp_path / "plans" / "linked").symlink_to("../elsewhere")
    (tmp_path / "plans" / "linked_again").symlink_to("../elsewhere")
    (tmp_path / "plans" / "another_own").symlink_to("own")
    (tmp_path / "elsewhere" / "back").symlink_to("../plans")
    (tmp_path / "plans" / "file.toml").symlink_to("c.toml")
    found = [str(path.relative_to(tmp_path)) for path in plans_below(tmp_path / "plans")]
    assert found == ["plans/c.toml", "plans/file.toml", "plans/linked/deep/a.toml", "plans/own/b.toml"]
