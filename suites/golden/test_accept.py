"""Accepting goldens: only what was asked for is written, and whole."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.files import Snapshot, write_whole
from pytest_fxbucket.golden.accept import AcceptQueue
from pytest_fxbucket.golden.store import render

OLD, NEW = render("old"), render("new")


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("mode", "after"),
    [
        ("new", {"there.txt": OLD, "missing.txt": NEW}),
        ("changed", {"there.txt": NEW}),
        ("all", {"there.txt": NEW, "missing.txt": NEW}),
        (None, {"there.txt": OLD}),
    ],
)
def test_a_mode_writes_what_it_names_and_nothing_else(tmp_path: Path, mode: str | None, after: dict[str, str]) -> None:
    (tmp_path / "there.txt").write_text(OLD)
    queue = AcceptQueue()
    for name in ("there.txt", "missing.txt"):
        queue.add(tmp_path / name, NEW)
    queue.flush(mode)
    assert files(tmp_path) == after


def test_nothing_is_written_before_the_flush(tmp_path: Path) -> None:
    AcceptQueue().add(tmp_path / "a.txt", NEW)
    assert files(tmp_path) == {}


def test_texts_travel_from_a_worker_as_plain_data(tmp_path: Path) -> None:
    worker, controller = AcceptQueue(), AcceptQueue()
    worker.add(tmp_path / "deep" / "a.txt", NEW)
    sent = worker.drain()
    assert sent == [{"path": str(tmp_path / "deep" / "a.txt"), "text": NEW}]
    assert worker.drain() == []
    controller.extend(sent)
    assert controller.flush("new").paths == (tmp_path / "deep" / "a.txt",)


def test_an_equal_golden_is_not_reported_as_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(NEW)
    queue = AcceptQueue()
    queue.add(tmp_path / "a.txt", NEW)
    assert queue.flush("all").paths == ()


def test_a_text_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenError):
        AcceptQueue().add(tmp_path / "a.txt", "no header\n")


def test_two_texts_for_one_golden_write_neither(tmp_path: Path) -> None:
    queue = AcceptQueue()
    queue.add(tmp_path / "a.txt", OLD)
    queue.add(tmp_path / "a.txt", NEW)
    written = queue.flush("all")
    assert written.paths == ()
    assert "a.txt was given two texts" in written.errors[0]
    assert files(tmp_path) == {}


def test_an_interrupted_run_writes_nothing_and_says_so(tmp_path: Path) -> None:
    queue = AcceptQueue()
    queue.add(tmp_path / "a.txt", NEW)
    assert queue.abandon("the run was interrupted").errors == ("1 accepted, but the run was interrupted",)
    assert queue.flush("all").paths == ()
    assert queue.abandon("the run was interrupted").errors == ()


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (errno.ENOSPC, "; make room and run again"),
        (errno.EACCES, "; make its folder writable first: chmod u+wx {folder}"),
        (errno.EIO, ""),
    ],
)
def test_a_write_that_fails_leaves_the_old_golden_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    (tmp_path / "a.txt").write_text(OLD)

    def full(source: str, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", full)
    queue = AcceptQueue()
    queue.add(tmp_path / "a.txt", NEW)
    written = queue.flush("all")
    told = f"{tmp_path / 'a.txt'} could not be written: {os.strerror(number)}{way.format(folder=tmp_path)}"
    assert written.errors == (told,)
    assert files(tmp_path) == {"a.txt": OLD}


def test_what_is_in_the_way_is_named_and_not_taken_for_somebody_elses_golden(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "golden", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text(OLD)
    (root / "linked").symlink_to(elsewhere)
    (root / "file").write_text("mine")
    queue = AcceptQueue()
    for name in ("linked", "file"):
        queue.add(root / name / "a.txt", NEW)
    assert queue.flush("all", Snapshot.of(root)).errors == (
        f"{root}/file is a file, where a folder of goldens was expected; move it away",
        f"{root}/linked is a symbolic link, and goldens are written to no other place; put a file or folder of its own there",
    )


def test_a_golden_can_be_read_by_others_as_any_new_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.txt", NEW)
    (tmp_path / "b.txt").write_text(NEW)
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "b.txt").stat().st_mode


def test_a_golden_is_replaced_and_never_written_over(tmp_path: Path) -> None:
    """A reader, or a run that is killed in the midst, would find half of it otherwise."""
    path, name_of_the_old = tmp_path / "a.txt", tmp_path / "old"
    path.write_text(OLD)
    os.link(path, name_of_the_old)
    assert write_whole(path, NEW)
    assert (path.read_text(), name_of_the_old.read_text()) == (NEW, OLD)


def test_a_golden_that_somebody_writes_while_ours_is_prepared_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sync = tmp_path / "a.txt", os.fsync
    path.write_text(OLD)
    queue, start = AcceptQueue(), Snapshot.of(tmp_path)
    queue.add(path, NEW)

    def somebody_else(handle: int) -> None:
        sync(handle)
        path.write_text("theirs")

    monkeypatch.setattr(os, "fsync", somebody_else)
    assert "was changed since the run began" in queue.flush("all", start).errors[0]
    assert files(tmp_path) == {"a.txt": "theirs"}


def test_no_other_run_writes_while_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, replace = AcceptQueue(), os.replace
    queue.add(tmp_path / "a.txt", NEW)

    def tried(source: str, target: Path) -> None:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        replace(source, target)

    monkeypatch.setattr(os, "replace", tried)
    assert queue.flush("all", Snapshot.of(tmp_path)).paths == (tmp_path / "a.txt",)
