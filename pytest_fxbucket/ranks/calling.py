"""What each rank does for a job: find its function, say what it raised, and see to processes that the job forks."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from pytest_fxbucket.ranks.wire import cut, line_of

_OURS = frozenset({os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "single_process")})


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in words: the first line of its message, its class's name, and its traceback from the job on."""

    error: str
    error_type: str
    traceback: str


def load(name: str) -> Callable[[int, int, object], object]:
    """The function "package.module:function"."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("Callable[[int, int, object], object]", found)


def raised(error: BaseException) -> Raised:
    """``error`` in words, whatever it makes of being asked for them."""
    line = line_of(error)
    try:
        text = "".join(traceback.format_exception(_without_our_frames(error)))
    except BaseException as second:
        text = f"{type(error).__name__}: {line} (its traceback cannot be shown: {type(second).__name__})\n"
    return Raised(line, type(error).__name__, cut(text))


def _without_our_frames(error: BaseException) -> BaseException:
    """From the job on; what a job puts around a user's function hides itself, as pytest's own frames do."""
    trace = error.__traceback__
    while trace is not None and (
        os.path.dirname(trace.tb_frame.f_code.co_filename) in _OURS or trace.tb_frame.f_locals.get("__tracebackhide__") is True
    ):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


# Processes that a job forks: they have no part in the rank's conversation, and end where they would go on as the rank.


_rank_pid = 0
_forks_from_main_thread = False


def stand_apart(connection: socket.socket) -> None:
    """Call it once in a rank: what this process forks from now on has no ``connection``, and dies with it."""
    global _rank_pid
    _rank_pid = os.getpid()
    os.register_at_fork(before=_before, after_in_child=lambda: _part(connection))


def is_twin() -> bool:
    """Whether this process is not the rank, but was forked by its job."""
    return os.getpid() != _rank_pid


def end(rank: int, outcome: str, error_type: str, error: str, traceback: str) -> NoReturn:
    """End the twin of ``rank``, which came out of the job in this way, as a process of its own would have ended."""
    if error_type != "SystemExit":
        told = f"{traceback}fxbucket: process {os.getpid()}, which the job forked, came out of it beside rank {rank}"
        sys.stderr.write(f"{told}, and was ended; end it with os._exit, and look at its exit status\n")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_status(outcome, error_type, error))


def _status(outcome: str, error_type: str, error: str) -> int:
    if error_type != "SystemExit":
        return int(outcome != "returned")
    return int(error) & 0xFF if error.lstrip("-").isdigit() else int(error not in ("", "None"))


def _before() -> None:
    global _forks_from_main_thread
    _forks_from_main_thread = threading.current_thread() is threading.main_thread()


def _part(connection: socket.socket) -> None:
    connection.close()
    # The kernel would end it with the thread that forked it; and what a child forks is none of ours.
    if _forks_from_main_thread and os.getppid() == _rank_pid:
        with contextlib.suppress(OSError):
            die_with(_rank_pid)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when process ``parent`` (who started it from its main thread) ends; exits if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends the ranks in its own time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
