"""No stored run is overwritten or left half: runs that end at once, are killed at any point, or find no room."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fxbucket.pytest_plugin.saving import never_replaced, replace_whole, save_new
from suites.bench import saver

ROOT = Path(__file__).parents[2]


class Savers:
    """Processes that save, all ended in the end."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(self, folder: Path, name: str, count: int, stop_at: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(saver.__file__), str(folder), name, str(count), stop_at]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._running.append(process)
        return process

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def savers() -> Iterator[Savers]:
    savers = Savers()
    yield savers
    savers.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_that_save_at_once_each_keep_all_their_runs(tmp_path: Path, savers: Savers) -> None:
    processes = [savers.start(tmp_path / "kind", f"of{number}", 15) for number in range(4)]
    assert [said(process) for process in processes] == ["ready"] * 4
    for process in processes:
        go(process)
    assert [process.wait() for process in processes] == [0] * 4
    files = sorted(path.name for path in (tmp_path / "kind").iterdir())
    assert [name[:4] for name in files] == [f"{number:04}" for number in range(1, 61)]
    stored = [json.loads((tmp_path / "kind" / name).read_text()) for name in files]
    assert sorted((each["of"], each["number"]) for each in stored) == [(f"of{who}", n) for who in range(4) for n in range(15)]


@pytest.mark.parametrize("stop_at", ["fsync-before", "fsync-after", "replace-before", "replace-after"])
def test_a_run_that_is_killed_leaves_its_file_whole_or_not_at_all(tmp_path: Path, savers: Savers, stop_at: str) -> None:
    before = save_new(tmp_path, "a", '{"stored": true}')
    process = savers.start(tmp_path, "killed", 1, stop_at)
    assert said(process) == "ready"
    go(process)
    assert said(process) == "there"
    process.kill()
    process.wait()
    assert before.read_bytes() == b'{"stored": true}'
    new = [path for path in tmp_path.glob("*_killed.json")]
    assert len(new) == (stop_at == "replace-after")
    assert all(len(json.loads(path.read_text())["data"]) == 20_000 for path in new)
    after = save_new(tmp_path, "b", "{}")
    assert set(held(tmp_path)) == {before.name, *(path.name for path in new), after.name}  # and nothing else is left


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_new(tmp_path, "a", "{}")
    replace_whole(tmp_path / "mine.json", "[]")
    before = held(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_new(tmp_path, "b", "{}")
    with pytest.raises(OSError, match="No space left"):
        replace_whole(tmp_path / "mine.json", "{}")
    assert held(tmp_path) == before


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "mine.json"
    link.symlink_to("there/real.json")
    for text in ("1", "2"):  # first a link to nothing yet
        replace_whole(link, text)
        assert link.is_symlink()
        assert held(tmp_path / "there") == {"real.json": text.encode()}


def test_a_pipe_and_a_device_are_written_to_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a device of this machine would be lost")

    monkeypatch.setattr(os, "replace", refuse)
    pipe, terminal = tmp_path / "pipe", tmp_path / "terminal"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    shown, device = os.openpty()
    terminal.symlink_to(os.ttyname(device))
    try:
        for path, end in ((pipe, reader), (terminal, shown)):
            replace_whole(path, "all")
            assert os.read(end, 10) == b"all"
        assert (pipe.is_fifo(), terminal.is_symlink(), terminal.is_char_device()) == (True, True, True)
    finally:
        for end in (reader, shown, device):
            os.close(end)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "terminal"]


def test_an_open_file_that_a_descriptor_names_is_written_to_itself(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as out:
        replace_whole(Path(f"/dev/fd/{out.fileno()}"), "all")
        assert out.read() == b"all"


def test_our_runs_below_the_storage_and_the_file_to_compare_with_are_never_replaced(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    run = save_new(storage / "kind", "a", '{"extra_info": {"fxbucket": {}}}')
    theirs = save_new(storage / "kind", "b", '{"extra_info": {}}')
    (tmp_path / "link").symlink_to(storage)
    (tmp_path / "run.json").symlink_to(run)
    (tmp_path / "base.json").write_text("{}")
    compared = str(tmp_path / "base.json")
    for path in (run, tmp_path / "link" / "kind" / run.name, tmp_path / "run.json"):
        assert never_replaced(path, storage, None) == "a stored run"
        assert never_replaced(path, tmp_path / "link", "latest") == "a stored run"
        assert never_replaced(path, None, str(run)) == "the run to compare with"
        assert never_replaced(path, None, None) == ""
    assert never_replaced(tmp_path / "base.json", storage, compared) == "the run to compare with"
    for path in (
        theirs,
        storage / "kind" / "0003_new.json",
        storage / "notes.json",
        tmp_path / "0001_a.json",
        tmp_path / "latest",
    ):
        assert never_replaced(path, storage, "latest") == ""


@pytest.mark.parametrize(
    ("there", "name"),
    [
        (["9999_a.json"], "10000_b.json"),
        (["9999_a.json", "10000_b.json"], "10001_b.json"),
        (
            ["0007_a.json", "notes.json", "abcd_a.json", "12_a.json", "0009_a.txt", "\u0669\u0669\u0669\u0669_a.json"],
            "0008_b.json",
        ),
        (["../0041_top.json", "0002_a.json"], "0042_b.json"),
        ([], "0001_b.json"),
    ],
)
def test_the_number_is_one_more_than_any_there(tmp_path: Path, there: list[str], name: str) -> None:
    folder = tmp_path / "kind"
    folder.mkdir()
    for each in there:
        (folder / each).write_text("{}")
    assert save_new(folder, "b", "{}", (tmp_path,)).name == name


def test_others_may_read_it_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert save_new(tmp_path, "a", "{}").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
