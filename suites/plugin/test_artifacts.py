"""One folder that several processes share: one writes and empties it, the others touch nothing but their own log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pytest_fxbucket.artifacts import Folder


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
