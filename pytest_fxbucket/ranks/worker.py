"""A rank: joins the group, then runs one job after another until the parent hangs up."""

from __future__ import annotations

import array
import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast

from pytest_fxbucket import backends
from pytest_fxbucket.backends import BACKENDS, MAX_RANKS, Backend
from pytest_fxbucket.compat import c10d
from pytest_fxbucket.compat.c10d import destroy_subgroups
from pytest_fxbucket.ranks import call_job, flight_recorder, output, wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.machine import use_device
from pytest_fxbucket.ranks.messages import Job, PoolRequest, Reply, StoreAddress
from pytest_fxbucket.ranks.process_groups import nccl, sums
from pytest_fxbucket.ranks.reset import Interpreter, JobEnvironment, SharedState

# Longer than any job (see pool.LONGEST_S): the parent is the one that looks at the clock.
_NEVER = timedelta(days=31)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a process is given at its start: the pool's request, its index in the pool, and its descriptors."""

    request: PoolRequest
    index: int
    connection: socket.socket
    records_fd: int
    store_fd: int
    stacks_fd: int

    @property
    def rank(self) -> int:
        """Its rank in the world."""
        return self.request.ranks[self.index]

    @property
    def world(self) -> int:
        """How many ranks there are, here and elsewhere."""
        return self.request.world

    @property
    def backend(self) -> Backend:
        """What its ranks run on."""
        return BACKENDS[self.request.backend]

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables that this process keeps, whatever environment a job brings."""
        gpus = self.request.gpus
        return nccl.settings(self.request.backend, gpus[self.index] if gpus else "", self.sharers)

    @property
    def sharers(self) -> int:
        """Among how many ranks this one's GPU is divided; 0: it has none."""
        gpus = self.request.gpus
        return backends.sharers(gpus.count(gpus[self.index]), self.request.ranks_per_gpu) if gpus else 0


class _HungUp(Exception):
    """The parent closed the connection."""


def serve(config: WorkerConfig) -> None:
    """Answer jobs over ``config.connection``; returns when the parent hangs up."""
    # Python takes .pyc files for current by size and mtime in seconds: a user's module may change twice within one.
    sys.dont_write_bytecode = True
    _install_faulthandler(config)
    call_job.separate_forks(config.connection)
    flight_recorder.adopt(config.records_fd, config.world)
    flight_recorder.act_as(config.rank)
    use_device("cuda:0" if config.request.gpus else "cpu")
    # Before the first use of CUDA and NCCL, which read their variables then.
    os.environ.update(config.settings)
    try:
        if config.backend.join:
            _join(config)
        # The default group stays from job to job; groups that jobs make are forgotten with them.
        flight_recorder.settle()
        environment = JobEnvironment(config.request, config.settings)
        interpreter = Interpreter.take()
        _send(config.connection, RankState(config.rank, "ready"))
        while True:
            _one_job(config, environment, interpreter)
    except (_HungUp, ConnectionError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            _send(config.connection, call_job.raised(config.rank, error))


def _join(config: WorkerConfig) -> None:
    if config.request.is_at_home:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    call_job.load(config.backend.join)(_store(config, config.request.store), config.rank, config.world, _NEVER)
    if config.backend.gpus == "each" and config.sharers > 1:
        nccl.share_memory(config.sharers)


def _store(config: WorkerConfig, address: StoreAddress | None) -> c10d.Store:
    if address is None:
        return c10d.FileStore(f"/proc/self/fd/{config.store_fd}", config.world)
    store = c10d.TCPStore(address.host, address.port, is_master=False)
    return c10d.PrefixStore(address.prefix, store)


def _one_job(config: WorkerConfig, environment: JobEnvironment, interpreter: Interpreter) -> None:
    buffers, outputs = _receive(config.connection)
    payload, _ = _receive(config.connection)
    job = cast(Job, wire.unpack(buffers))
    # The last job's groups end only now: a new job is sent once all ranks have answered, so nobody uses them any more.
    destroy_subgroups()
    sums.add_by()
    output.give(outputs[1:])
    _send_output_to(outputs[0])
    shared = SharedState((config.connection.fileno(), config.stacks_fd))
    state, result = call_job.call(config.rank, partial(_run, config, environment, job, payload), wire.pack)
    interpreter.put_back(partial(_install_faulthandler, config))
    state.lost = shared.lost()
    # Else these numbers may be other files by now, and the parent replaces this process anyway.
    if not state.lost:
        for fd in outputs[1:]:
            os.close(fd)
        _send_output_to(None)
    _send(config.connection, state, result, job.number)


def _run(config: WorkerConfig, environment: JobEnvironment, job: Job, payload: list[wire.Buffer]) -> object:
    environment.enter(job)
    function = call_job.load(job.function)
    with nccl.WatchedLaunches(config.rank) if config.backend.is_watched else contextlib.nullcontext():
        value = function(config.rank, config.world, wire.unpack(payload))
    # Not after an error, since that ends this process.
    environment.leave()
    return value


def _install_faulthandler(config: WorkerConfig) -> None:
    faulthandler.enable(file=config.stacks_fd, all_threads=True)
    # Unregistered first: otherwise register does nothing, even if a job has put a handler of its own in the place.
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=config.stacks_fd, all_threads=True)


def _send_output_to(target: int | None) -> None:
    # What is still buffered was printed for the old target, and an answer must not overtake it.
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(os.devnull, os.O_WRONLY) if target is None else target
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _send(connection: socket.socket, state: RankState, result: Sequence[wire.Buffer] = (), job: int = 0) -> None:
    buffers = [*wire.pack(Reply(state, job, os.getpid())), *result]
    connection.sendall(wire.head(buffers))
    for buffer in buffers:
        connection.sendall(buffer)


def _receive(connection: socket.socket) -> tuple[list[wire.Buffer], list[int]]:
    """One frame, and the descriptors that came with it."""
    # Descriptors come with the first bytes of a job (see Conversation._send_some), so only this read asks for them.
    data, ancillary, _, _ = connection.recvmsg(wire.HEAD.size, socket.CMSG_SPACE(4 * MAX_RANKS))
    if not data:
        raise _HungUp
    fds = array.array("i")
    for _, _, part in ancillary:
        fds.frombytes(part[: len(part) // 4 * 4])
    parts = wire.frame()
    first = next(parts)
    first[: len(data)] = data
    _fill(connection, memoryview(first)[len(data) :])
    while True:
        try:
            _fill(connection, memoryview(next(parts)))
        except StopIteration as end:
            return end.value, fds.tolist()


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view)
        if not received:
            raise _HungUp
        view = view[received:]
