"""Processes that a job forks: they have no part in the rank's conversation, and end where they would go on as the rank."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from typing import NoReturn

from pytest_fxbucket.ranks.death import die_with

_rank_pid = 0
_forks_from_main_thread = False


def stand_apart(connection: socket.socket) -> None:
    """Call it once in a rank: what this process forks from now on has no `connection`, and dies with it."""
    global _rank_pid
    _rank_pid = os.getpid()
    os.register_at_fork(before=_before, after_in_child=lambda: _part(connection))


def is_twin() -> bool:
    """Whether this process is not the rank, but was forked by its job."""
    return os.getpid() != _rank_pid


def end(rank: int, outcome: str, error_type: str, error: str, traceback: str) -> NoReturn:
    """End the twin of `rank`, which came out of the job in this way, as a process of its own would have ended."""
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
