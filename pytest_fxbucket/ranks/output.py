"""Where a job's output goes: a file for each rank, or memory that keeps the last part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

KEPT_BYTES = 1 << 16


class Output:
    """`targets[rank]` is the descriptor that takes a rank's output; `sources`, if any, must be read through `take`."""

    def __init__(self, log_dir: Path | None, world: int) -> None:
        self.sources: list[int] = []
        self.targets: list[int] = []
        self._kept = [b""] * world
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(world):
            if log_dir is not None:
                self.targets.append(_open(log_dir / f"rank{rank}.log"))
                continue
            source, target = os.pipe()
            os.set_blocking(source, False)
            self.sources.append(source)
            self.targets.append(target)

    def take(self, rank: int) -> None:
        """Keep what `rank` has printed so far; of everything only the last 64 KiB."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.sources[rank], KEPT_BYTES):
                self._kept[rank] = (self._kept[rank] + data)[-KEPT_BYTES:]

    def tail(self, rank: int) -> str:
        """The last 64 KiB that `rank` printed, as text."""
        if self.sources:
            self.take(rank)
            data = self._kept[rank]
        else:
            size = os.fstat(self.targets[rank]).st_size
            data = os.pread(self.targets[rank], KEPT_BYTES, max(0, size - KEPT_BYTES))
        return data.decode("utf-8", "replace")

    def close(self) -> None:
        """Let go of files and pipes."""
        for fd in (*self.sources, *self.targets):
            os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
