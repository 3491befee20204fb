"""Ranks seen from outside: their state by the kernel, and their Python stacks, made readable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_fxbucket.ranks.flight_recorder import ranks_text

_POLL_S = 0.01
# The last lines of a complete dump. The oldest thread comes last, and the bottom of its stack is where Python was started with
# -m; the other two are what faulthandler writes if a stack is too deep, or threads are too many.
_LAST_LINES = ("in _run_module_as_main\n", "  ...\n", "...\n")


def process_state(pid: int) -> str:
    """The kernel's letter for ``pid``: R runs, S sleeps, D waits for a device, T is stopped, also by a debugger; "": gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name of the program comes first, in brackets, and may have brackets and spaces itself.
    letter = text.rpartition(")")[2].split()[0]
    return "T" if letter == "t" else letter


def collect_stacks(processes: Sequence[tuple[int, int, int]], limit_s: float = 1.5) -> list[str]:
    """The Python stacks of all threads of each process (pid, pidfd, file), which faulthandler writes into that file.

    "" for a process whose stacks did not come in time. A stopped rank has to be woken for its dump, which comes last: as soon
    as it runs, the ranks that wait for it go on. Faulthandler does not say when it is done, so the end of the text tells; a
    rank that is descheduled in the middle of its dump is waited for.
    """
    dumps = [_Dump(file) for _, _, file in processes]
    stopped = [process_state(pid) == "T" for pid, _, _ in processes]
    for (pid, pidfd, _), stands in zip(processes, stopped, strict=True):
        if stands:
            _send_to_main_thread(pid, signal.SIGUSR1)
        else:
            send(pidfd, signal.SIGUSR1)
    deadline = time.monotonic() + limit_s
    # Half of the time at most: a rank that cannot answer must not cost the stack of a stopped one, which holds up all.
    running = [dump for dump, stands in zip(dumps, stopped, strict=True) if not stands]
    _await(running, deadline - limit_s / 2 if any(stopped) else deadline)
    for (_, pidfd, _), stands in zip(processes, stopped, strict=True):
        if stands:
            send(pidfd, signal.SIGCONT)
    _await(dumps, deadline)
    return [dump.text for dump in dumps]


class _Dump:
    """What faulthandler adds to one file from now on."""

    def __init__(self, file: int) -> None:
        self._file, self._start = file, os.fstat(file).st_size
        self.text = ""

    def is_whole(self) -> bool:
        if not self.text.endswith(_LAST_LINES):
            self.text = read_from(self._file, self._start)
        return self.text.endswith(_LAST_LINES)


def _await(dumps: Sequence[_Dump], deadline: float) -> None:
    while not all([dump.is_whole() for dump in dumps]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def read_from(file: int, start: int = 0, limit_bytes: int = 1 << 18) -> str:
    """Text in ``file`` from ``start`` on."""
    return os.pread(file, limit_bytes, start).decode("utf-8", "replace")


def send(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _send_to_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal to the main thread of ``pid``, which handles it first when the process is woken.

    A signal to the process may be handled by another thread, while the main one goes on from where it stood.
    """
    ctypes.CDLL(None).tgkill(pid, pid, number)


# Python stacks as faulthandler writes them, made readable: from the job on, and equal ones once.


_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+( \[[^]]*\])?( \(most recent call first\))?:$")
# The frame in which a rank calls its job: the frames below it are the rank's own loop, and not shown.
_JOB_BEGINS = re.compile(r'File ".*[/\\]pytest_fxbucket[/\\]ranks[/\\]worker\.py", line \d+ in _run$')
_RANK_LOOP = re.compile(r'File ".*[/\\]pytest_fxbucket[/\\]ranks[/\\]worker\.py", line \d+ in ')
_IDLE = "  has no job"
NO_STACK = "(no stack: the rank did not answer)"


def readable(stack: str) -> str:
    """The threads of a dump, each from its innermost frame to where the job began, without addresses."""
    lines: list[str] = []
    skipping = False
    for line in stack.splitlines():
        if _THREAD.match(line):
            skipping = False
            lines.append("thread, innermost frame first:")
        elif _JOB_BEGINS.search(line):
            skipping = True
        elif not skipping and _RANK_LOOP.search(line) and lines and lines[-1].startswith("thread"):
            lines.append(_IDLE)
            skipping = True
        elif line.strip() and not skipping:
            lines.append(line)
    return "\n".join(lines)


def folded(stacks: Mapping[int, str]) -> Iterator[str]:
    """All stacks, equal ones once with all their ranks; nothing if no rank is in its job any more."""
    same: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        same.setdefault(stack, []).append(rank)
    for stack, ranks in same.items() if any(not stack.endswith(_IDLE) for stack in same) else ():
        yield f"--- {ranks_text(tuple(ranks))}, Python stacks"
        yield from stack.splitlines()
