"""What parent, server and ranks say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_fxbucket.ranks.failure import RankState


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
    """Parent to server: fork a pool. With it go the descriptors of control and records, and each rank's socket and stack file.

    ``ranks`` are forked, of a world of ``world``. They meet at ``store``; None: all ranks are forked here, and meet in a file
    in memory. ``backend`` names the back end whose default process group they join, if it has one. ``gpus``: the UUID of the
    GPU that each of ``ranks`` sees as its device "cuda:0"; empty off GPUs. ``ranks_per_gpu``: how many ranks may share a GPU;
    0: as many as must. ``module``: imported by the server before it forks, so that the ranks need not.
    """

    world: int
    threads: int
    ranks: tuple[int, ...]
    backend: str
    store: StoreAddress | None = None
    gpus: tuple[str, ...] = ()
    ranks_per_gpu: int = 0
    module: str = ""

    @property
    def is_at_home(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.store is None or self.store.is_at_home


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Server to parent once torch is imported; ``problem`` says why it could not start."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class ForkedRanks:
    """Server to pool, with a pidfd for each rank; ``problem`` says why there are none."""

    pids: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RankExited:
    """Server to pool: process ``index`` of it ended with ``status`` as waitstatus_to_exitcode gives it (< 0: a signal)."""

    index: int
    status: int


@dataclass(frozen=True, slots=True)
class Job:
    """Parent to rank, followed by the payload's frame; with it go the descriptors that take the output of its ranks.

    ``number`` counts the jobs of the pool from 1.
    """

    number: int
    function: str
    paths: tuple[str, ...]
    sys_path: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Rank to parent, before the result's buffers: what became of job number ``job``; ``pid`` is the process that says so.

    Once the group is up, ``state.outcome`` is "ready" and ``job`` is 0.
    """

    state: RankState
    job: int = 0
    pid: int = 0
