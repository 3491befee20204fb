"""What parent, server and ranks say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Parent to server, with the descriptors of control, slots, and of each rank its socket and its stack file."""

    world: int
    threads: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Server to parent once torch is imported; `problem` says why it could not start."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """Server to pool, with a pidfd for each rank; `problem` says why there are none."""

    pids: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """Server to pool: rank ended with `status` as os.waitstatus_to_exitcode gives it (negative: a signal)."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class Job:
    """Parent to rank, followed by the payload's frame; with it goes the descriptor that takes the rank's output."""

    function: str
    paths: tuple[str, ...]
    sys_path: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Rank to parent, before the result's buffers.

    `outcome` is "ready" (the group is up), "returned", "raised" or "unpicklable"; `at` the monotonic clock in seconds;
    `error` one line, `error_type` the exception's class name, `traceback` its text; `collectives` how many the rank has
    launched on the default group so far.
    """

    outcome: str
    at: float
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    collectives: int = 0
