"""Where the output of a process goes that plays several ranks: to the rank's own log, as long as it is that rank's turn."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Self

from pytest_fxbucket.ranks.output import KEPT_BYTES


class Outlets:
    """A file for each rank in `log_dir`, or in memory; rank 0's, where there are logs, is what the process has already."""

    def __init__(self, world: int, log_dir: str) -> None:
        self._log_dir = log_dir
        self._fds = [self._open(rank) for rank in range(world)]
        self._first = (os.dup(1), os.dup(2))

    def lead_to(self, rank: int) -> None:
        """Let output go to `rank`'s log from now on."""
        _flush()
        os.dup2(self._fds[rank], 1)
        os.dup2(self._fds[rank], 2)

    def tail(self, rank: int) -> str:
        """The last 64 KiB that `rank` printed, as text."""
        size = os.fstat(self._fds[rank]).st_size
        return os.pread(self._fds[rank], KEPT_BYTES, max(0, size - KEPT_BYTES)).decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _flush()
        for fd, first in zip((1, 2), self._first, strict=True):
            os.dup2(first, fd)
        for fd in (*self._first, *self._fds):
            os.close(fd)

    def _open(self, rank: int) -> int:
        if not self._log_dir:
            return os.memfd_create("fxbucket-output", os.MFD_CLOEXEC)
        if rank == 0:
            return os.open(os.path.join(self._log_dir, "rank0.log"), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        return os.open(os.path.join(self._log_dir, f"rank{rank}.log"), flags, 0o600)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
