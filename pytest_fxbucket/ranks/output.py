"""Where a job's output goes: a file for each rank, or memory that keeps the last part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

KEPT_BYTES = 1 << 16


class Output:
    """Output of the processes `names`, in their order: `targets` take it; `sources`, if any, must be read through `take`.

    With a folder, each has a file there, `<name>.log`, which no other user can read.
    """

    def __init__(self, log_dir: Path | None, names: Sequence[str]) -> None:
        self.sources: list[int] = []
        self.targets: list[int] = []
        self._kept = [b""] * len(names)
        if log_dir is not None:
            log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            if log_dir is not None:
                self.targets.append(_open(log_dir / f"{name}.log"))
                continue
            source, target = os.pipe()
            os.set_blocking(source, False)
            self.sources.append(source)
            self.targets.append(target)

    def take(self, index: int) -> None:
        """Keep what process `index` has printed so far; of everything only the last 64 KiB."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.sources[index], KEPT_BYTES):
                self._kept[index] = (self._kept[index] + data)[-KEPT_BYTES:]

    def tail(self, index: int) -> str:
        """The last 64 KiB that process `index` printed, as text."""
        if self.sources:
            self.take(index)
            data = self._kept[index]
        else:
            size = os.fstat(self.targets[index]).st_size
            data = os.pread(self.targets[index], KEPT_BYTES, max(0, size - KEPT_BYTES))
        return data.decode("utf-8", "replace")

    def close(self) -> None:
        """Let go of files and pipes."""
        for fd in (*self.sources, *self.targets):
            os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
