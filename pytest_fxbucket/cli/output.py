"""Where a command's words go: streams that are closed, full, read by nobody, or that cannot write every letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_UNREAD = 141
"""Exit status that shells give a command which SIGPIPE ended."""
_UNWRITTEN = 2
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def written(run: Callable[[], int]) -> int:
    """What ``run`` gives, its output written to the end; 141 if nobody reads that any more, 2 if it cannot be written."""
    sys.stdout, sys.stderr = (sys.stdout or _nowhere()), (sys.stderr or _nowhere())  # None if they were closed: ``>&-``
    _write_in(None)
    try:
        status = run()
        # What cannot be written is met here, and not when Python ends, where nobody could handle it.
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as before ``| head``
        _drop_the_rest()
        return _UNREAD
    except OSError as error:
        if error.errno not in _OF_DISKS or error.filename is not None:
            raise
        _drop_the_rest()
        print(f"fxbucket: what it says cannot be written: {error.strerror}", file=sys.stderr)
        return _UNWRITTEN


def write_utf8(text: str) -> None:
    """Write ``text`` as the bytes that a file of it has, whatever stdout's encoding is."""
    _write_in("utf-8")
    sys.stdout.write(text)


def _write_in(encoding: str | None) -> None:
    # As stderr has it: a name that is not in a terminal's alphabet is no reason to lose a verdict.
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # of one that somebody opened to be read, too
            sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _nowhere() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")  # closed with the process


def _drop_the_rest() -> None:
    """What is still to be flushed when Python ends goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
