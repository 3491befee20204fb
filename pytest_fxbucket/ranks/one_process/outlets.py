"""Where the output of a process goes that plays several ranks: into the rank's own pipe, as long as it is that rank's turn."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_given: Sequence[int] = ()


def give(fds: Sequence[int]) -> None:
    """Say once a job, before it runs, where output of the ranks after rank 0 goes, whose is what the process has already."""
    global _given
    _given = fds


class Outlets:
    """What was given, in rank order."""

    def __init__(self) -> None:
        self._first = (os.dup(1), os.dup(2))
        self._fds = (self._first[0], *_given)

    def lead_to(self, rank: int) -> None:
        """Let output go to `rank`'s pipe from now on."""
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
        sys.stdout.flush()
        sys.stderr.flush()
