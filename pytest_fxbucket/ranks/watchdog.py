"""Looking at ranks from outside: what the kernel says of them, and their Python stacks while they run, wait, or stand still."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_S = 0.01
_QUIET_POLLS = 4


def process_state(pid: int) -> str:
    """The kernel's letter for `pid`: R runs, S sleeps, D waits for a device, T is stopped; "" when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def collect_stacks(pidfds: Sequence[int], files: Sequence[int], limit_s: float = 0.8) -> list[str]:
    """The Python stacks of all threads of each rank, which faulthandler writes into `files`; "" where none came in time.

    A stopped rank is woken for it. Faulthandler does not say when it is done: a file that stays as long as it is counts.
    """
    before = [os.fstat(file).st_size for file in files]
    for pidfd in pidfds:
        send(pidfd, signal.SIGUSR1)
        send(pidfd, signal.SIGCONT)
    deadline = time.monotonic() + limit_s
    sizes, quiet = list(before), 0
    while quiet < _QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = [os.fstat(file).st_size for file in files]
        complete = now == sizes and all(size > start for size, start in zip(now, before, strict=True))
        quiet = quiet + 1 if complete else 0
        sizes = now
    return [read_from(file, start) for file, start in zip(files, before, strict=True)]


def read_from(file: int, start: int = 0, limit_bytes: int = 1 << 18) -> str:
    """Text in `file` from `start` on."""
    return os.pread(file, limit_bytes, start).decode("utf-8", "replace")


def send(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def threads_per_rank(world: int, environ: Mapping[str, str], cores: int | None = None) -> int:
    """Threads for each of `world` ranks such that those of all xdist workers together fit the cores; at least 1."""
    have = cores if cores is not None else len(os.sched_getaffinity(0))
    workers = environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return max(1, have // (world * (int(workers) if workers.isdigit() and int(workers) > 0 else 1)))
