"""What parent, server and ranks say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_RANKS = 64
"""Processes of one pool, or ranks of one process that have outputs of their own: 250 descriptors go with one message."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A TCPStore that somebody serves; ``prefix`` keeps one group's keys apart from another's.

    ``is_at_home``: all ranks are on this machine, and shall talk over loopback alone.
    """

    host: str
    port: int
    prefix: str
    is_at_home: bool = True


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Parent to server, with the descriptors of control, ledgers, and of each rank its socket and its stack file.

    ``ranks`` of a world of ``world`` are to be forked, which meet at ``store``, or in memory of their own if all are here.
    ``backend`` is what their default process group runs on; "": they join none. ``devices``: one for each of ``ranks``, "cpu"
    or "cuda:0". ``gpus``: on GPUs, the UUID of the one that each of ``ranks`` sees.
    """

    world: int
    threads: int
    ranks: tuple[int, ...]
    backend: str
    devices: tuple[str, ...]
    store: StoreAddress | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Server to parent once torch is imported; ``problem`` says why it could not start."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """Server to pool, with a pidfd for each rank; ``problem`` says why there are none."""

    pids: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """Server to pool: process ``index`` of it ended with ``status`` as waitstatus_to_exitcode gives it (< 0: a signal)."""

    index: int
    status: int


@dataclass(frozen=True, slots=True)
class Job:
    """Parent to rank, followed by the payload's frame; with it go the descriptors that take the output of its ranks.

    ``number``: which of this rank's jobs it is, 1 the first.
    """

    number: int
    function: str
    paths: tuple[str, ...]
    sys_path: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Rank to parent, before the result's buffers.

    ``outcome`` is "ready" (the group is up), "returned", "raised" or "unpicklable"; ``at`` the monotonic clock in seconds;
    ``error`` one line, ``error_type`` the exception's class name, ``traceback`` its text. ``job`` is the number of the job that
    it answers, 0 for "ready", and ``pid`` who says so. ``lost``: what the job took away that other jobs would need.
    """

    outcome: str
    at: float
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    job: int = 0
    pid: int = 0
    lost: str = ""
