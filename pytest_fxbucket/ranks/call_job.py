"""How a rank calls a job: find and call its function, say what became of it, and end what it forks together with the rank."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, cast

from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.wire import cut, line_of

Packed = list[wire.Buffer]
"""A pickle and its buffers."""
_OURS = frozenset({os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "single_process")})


def load(name: str) -> Callable[..., Any]:
    """The function "package.module:function"."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("Callable[..., Any]", found)


def call(rank: int, job: Callable[[], object], pack: Callable[[object], Packed]) -> tuple[RankState, Packed]:
    """Call ``job`` as ``rank``: what became of it, and its packed result, which is empty unless it returned.

    A process that the job forked, and that comes out of the job too, ends here.
    """
    result: Packed = []
    state = RankState(rank, "returned")
    try:
        value = job()
    except wire.Unpicklable as error:
        state = RankState(rank, "unpicklable", error=f"its payload cannot be read ({error})")
    except BaseException as error:  # SystemExit from a user's code is a failure like any other
        state = raised(rank, error)
    if state.outcome == "returned":
        try:
            result = pack(value)
        except wire.Unpicklable as error:
            text = f"its result, of type {type(value).__name__}, cannot be pickled ({error})"
            state = RankState(rank, "unpicklable", error=text)
    if os.getpid() != _rank_pid:
        _end(state)
    state.at = time.monotonic()
    return state, result


def raised(rank: int, error: BaseException) -> RankState:
    """The state of a rank that ``error`` ended; asking ``error`` for its text or traceback may raise as well."""
    line = line_of(error)
    try:
        text = "".join(traceback.format_exception(_without_our_frames(error)))
    except BaseException as second:
        text = f"{type(error).__name__}: {line} (its traceback cannot be shown: {type(second).__name__})\n"
    try:
        said = cut(str(error))
    except BaseException:
        said = line
    classes = tuple(map(wire.class_name, type(error).__mro__))
    return RankState(rank, "raised", time.monotonic(), line, type(error).__name__, cut(text), text=said, classes=classes)


def _without_our_frames(error: BaseException) -> BaseException:
    """``error`` with its traceback from the job on: our frames go, and frames that hide themselves as pytest's do."""
    trace = error.__traceback__
    while trace is not None and (
        os.path.dirname(trace.tb_frame.f_code.co_filename) in _OURS or trace.tb_frame.f_locals.get("__tracebackhide__") is True
    ):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


# Processes that a job forks: they take no part in the rank's conversation, and end where they would go on as the rank.


_rank_pid = 0
_forks_from_main_thread = False


def separate_forks(connection: socket.socket) -> None:
    """Call once in a rank: processes that it forks from now on close ``connection``, and die when the rank does."""
    global _rank_pid
    _rank_pid = os.getpid()
    os.register_at_fork(before=_before, after_in_child=lambda: _part(connection))


def _end(state: RankState) -> NoReturn:
    """End this process, which a job forked, with the exit status that a program would have that ended with ``state``."""
    if state.error_type != "SystemExit":
        who = f"fxbucket: process {os.getpid()}, which the job forked, came out of it beside rank {state.rank}"
        sys.stderr.write(f"{state.traceback}{who}, and was ended; end it with os._exit, and look at its exit status\n")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if state.error_type != "SystemExit":
        os._exit(int(state.outcome != "returned"))
    # As Python takes what sys.exit is given: a number is the status, nothing is 0, any text is 1.
    os._exit(int(state.error) & 0xFF if state.error.lstrip("-").isdigit() else int(state.error not in ("", "None")))


def _before() -> None:
    global _forks_from_main_thread
    _forks_from_main_thread = threading.current_thread() is threading.main_thread()


def _part(connection: socket.socket) -> None:
    connection.close()
    # The kernel would kill it when the thread that forked it ends, and only the main thread lives as long as the rank. What a
    # child of the rank forks is left alone.
    if _forks_from_main_thread and os.getppid() == _rank_pid:
        with contextlib.suppress(OSError):
            die_with(_rank_pid)


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when process ``parent`` (who started it from its main thread) ends; exits if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the call above: then no signal comes any more.
    if os.getppid() != parent:
        os._exit(0)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends the ranks in its own time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
