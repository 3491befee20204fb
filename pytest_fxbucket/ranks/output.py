"""Where a job's output goes: through a pipe for each rank into its log, and into memory that keeps the last part."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

KEPT_BYTES = 1 << 16
"""Bytes of the end of each rank's output that are kept, and shown."""
LOG_BYTES = 16 << 20
"""Bytes of the beginning of each rank's output that its log has; the end follows when the job is over."""
_WORD_BYTES = 80
# Most reads at once, or a rank that prints without end would keep the reader for ever; together more than a pipe holds.
_READS = 32


class Output:
    """A pipe for the output of each rank. ``names`` has the names of each process's ranks, ``targets`` the ends they write to.

    ``sources`` are the ends to read, one for each name in order; they must be read through ``take``. With a folder, each name
    has a file ``<name>.log`` there, which no other user can read.
    """

    def __init__(self, log_dir: Path | None, names: Sequence[Sequence[str]]) -> None:
        self.sources: list[int] = []
        self.targets: list[list[int]] = []
        self._printed: list[_Printed] = []
        if log_dir is not None:
            log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for of_process in names:
            self.targets.append([])
            for name in of_process:
                source, target = os.pipe()
                os.set_blocking(source, False)
                self.sources.append(source)
                self.targets[-1].append(target)
                self._printed.append(_Printed(_open(log_dir / f"{name}.log") if log_dir is not None else None))

    def take(self, index: int) -> None:
        """Read some of what rank number ``index`` has printed."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS):
                self._printed[index].add(os.read(self.sources[index], KEPT_BYTES))

    def tails(self) -> list[str]:
        """The last 64 KiB that each rank printed, as text that says what is left out before it."""
        for index in range(len(self.sources)):
            self.take(index)
        return [printed.tail() for printed in self._printed]

    def close(self) -> None:
        """Let go of files and pipes."""
        for fd in (*self.sources, *(target for targets in self.targets for target in targets)):
            os.close(fd)
        for printed in self._printed:
            printed.close()


class _Printed:
    """What one rank printed: its beginning in the file ``log``, and its end."""

    def __init__(self, log: int | None) -> None:
        self._log = log
        self._size = self._logged = 0
        self._end = b""

    def add(self, data: bytes) -> None:
        self._size += len(data)
        # A read that fills the whole end needs no copy of what was there before.
        self._end = data if len(data) == KEPT_BYTES else (self._end + data)[-KEPT_BYTES:]
        if self._log is not None:
            self._write(data[: max(0, LOG_BYTES - self._logged)])

    def tail(self) -> str:
        if self._size <= KEPT_BYTES:
            return self._end.decode("utf-8", "replace")
        # Room for the note about what is left out, so that text and note together are no longer than what is kept.
        kept = self._end[_WORD_BYTES - KEPT_BYTES :]
        return f"... ({self._size - len(kept):,} bytes before this are left out)\n" + kept.decode("utf-8", "replace")

    def close(self) -> None:
        if self._log is None:
            return
        rest = self._size - self._logged
        if rest > 0:
            # What the log does not have yet, as far as it is kept: if the job printed more than both hold, the middle is lost.
            end = self._end[-rest:]
            left_out = f"\n... ({rest - len(end):,} bytes left out: a log has the first {LOG_BYTES >> 20} MiB and the end)\n"
            self._write((left_out.encode() if rest > len(end) else b"") + end)
        os.close(self._log)
        self._log = None

    def _write(self, data: bytes) -> None:
        # A full disk must not end the run: what it does not take is left out.
        with contextlib.suppress(OSError):
            while data and self._log is not None:
                written = os.write(self._log, data)
                self._logged, data = self._logged + written, data[written:]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


# A process that plays several ranks: its output goes into the pipe of the rank whose turn it is.


_given: Sequence[int] = ()


def give(fds: Sequence[int]) -> None:
    """Set, before a job runs, the pipes of the ranks after rank 0; the process already writes into that of rank 0."""
    global _given
    _given = fds


class Outlets:
    """The pipes of all ranks that this process plays, in rank order; on exit descriptors 1 and 2 are as before."""

    def __init__(self) -> None:
        self._first = (os.dup(1), os.dup(2))
        self._fds = (self._first[0], *_given)

    def lead_to(self, rank: int) -> None:
        """Let output go to ``rank``'s pipe from now on."""
        # What is still buffered was printed by the rank before.
        _flush()
        os.dup2(self._fds[rank], 1)
        os.dup2(self._fds[rank], 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _flush()
        for fd, first in zip((1, 2), self._first, strict=True):
            os.dup2(first, fd)
            os.close(first)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # a rank may have closed it
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):  # the last two: where the others are redirected
            if stream is not None:
                stream.flush()
