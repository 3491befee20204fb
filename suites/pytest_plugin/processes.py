"""Processes that a run of pytest within a test has started, found by what its environment says."""

from __future__ import annotations

import contextlib
import os
import select
import uuid
from pathlib import Path

import pytest


class Trace:
    """Marks the environment and the temporary folder of what is started from now on, and tells what is left of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._setting = f"FXBUCKET_SUITE={uuid.uuid4()}"
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        self._shared = shared_memory()
        monkeypatch.setenv(*self._setting.split("="))
        monkeypatch.setenv("TMPDIR", str(self._temporary))

    def processes(self) -> list[int]:
        """Those that live now, but for this one."""
        return [pid for pid in started_with(self._setting) if pid != os.getpid()]

    def left(self, pids: list[int]) -> list[str]:
        """What does not end or vanish by itself: processes, temporary files, and shared memory that names one of `pids`."""
        processes = [f"process {pid}" for pid in {*pids, *self.processes()} if not ends(pid)]
        # torch makes an empty folder for its compiler's cache, once for each user of a machine.
        files = [str(path) for path in self._temporary.rglob("*") if not path.name.startswith("torchinductor_")]
        shared = [name for name in shared_memory() - self._shared if any(str(pid) in name for pid in pids)]
        return processes + files + shared


def started_with(setting: str) -> list[int]:
    """Processes that have ``setting`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if setting.encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def below(pid: int) -> list[int]:
    """The children of a process that live, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def ends(pid: int, limit_s: float = 10) -> bool:
    """Say whether a process ends by itself; one that was told to may take a moment."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], limit_s)[0])
    finally:
        os.close(handle)
