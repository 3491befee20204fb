"""A rank: joins the group, then runs one job after another until the parent hangs up."""

from __future__ import annotations

import array
import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast

import torch.distributed as dist

from pytest_fxbucket.backends import BACKENDS, MAX_RANKS, Backend
from pytest_fxbucket.compat import c10d
from pytest_fxbucket.compat.c10d import destroy_subgroups
from pytest_fxbucket.ranks import call_job, flight_recorder, output, wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.fresh import Interpreter, Workplace
from pytest_fxbucket.ranks.machine import use_device
from pytest_fxbucket.ranks.messages import Job, PoolRequest, Reply, StoreAddress
from pytest_fxbucket.ranks.process_groups import nccl, sums
from pytest_fxbucket.ranks.process_groups.entered import Entered

# Longer than any job (see pool.LONGEST_S): the parent is the one that looks at the clock.
_NEVER = timedelta(days=31)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a process is given at its start: which of a pool's it is, and its descriptors."""

    request: PoolRequest
    index: int
    connection: socket.socket
    ledgers_fd: int
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
        """What its environment holds whatever a job's says."""
        gpus = self.request.gpus
        return nccl.settings(self.request.backend, gpus[self.index] if gpus else "")

    @property
    def is_at_home(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.request.store is None or self.request.store.is_at_home


class _HungUp(Exception):
    """The parent closed the connection."""


def serve(seat: WorkerConfig) -> None:
    """Answer jobs over ``seat.connection``; returns when the parent hangs up."""
    sys.dont_write_bytecode = True
    _install_faulthandler(seat)
    call_job.stand_apart(seat.connection)
    flight_recorder.adopt(seat.ledgers_fd, seat.world)
    flight_recorder.act_as(seat.rank)
    use_device(seat.request.devices[seat.index])
    os.environ.update(seat.settings)
    try:
        if seat.backend.join:
            _join(seat)
        flight_recorder.settle()
        workplace = Workplace(seat.request.threads, seat.is_at_home, seat.request.backend, seat.settings)
        interpreter = Interpreter.take()
        _send(seat.connection, RankState(seat.rank, "ready"))
        while True:
            _one_job(seat, workplace, interpreter)
    except (_HungUp, ConnectionError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            _send(seat.connection, call_job.raised(seat.rank, error))


def _join(seat: WorkerConfig) -> None:
    if seat.is_at_home:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    call_job.load(seat.backend.join)(_store(seat, seat.request.store), seat.rank, seat.world, _NEVER)


def _store(seat: WorkerConfig, address: StoreAddress | None) -> c10d.Store:
    if address is None:
        return c10d.FileStore(f"/proc/self/fd/{seat.store_fd}", seat.world)
    store = c10d.TCPStore(address.host, address.port, is_master=False)
    return c10d.PrefixStore(address.prefix, store)


def _one_job(seat: WorkerConfig, workplace: Workplace, interpreter: Interpreter) -> None:
    buffers, outputs = _receive(seat.connection)
    payload, _ = _receive(seat.connection)
    job = cast(Job, wire.unpack(buffers))
    # Only now is it sure that every rank is through with them.
    destroy_subgroups()
    sums.add_by()
    output.give(outputs[1:])
    _send_output_to(outputs[0])
    footing = Footing((seat.connection.fileno(), seat.stacks_fd))
    state, result = call_job.call(seat.rank, partial(_run, seat, workplace, job, payload), wire.pack)
    interpreter.put_back(partial(_install_faulthandler, seat))
    state.lost = footing.lost()
    if not state.lost:
        for fd in outputs[1:]:
            os.close(fd)
        _send_output_to(None)
    _send(seat.connection, state, result, job.number)


def _run(seat: WorkerConfig, workplace: Workplace, job: Job, payload: list[wire.Buffer]) -> object:
    workplace.enter(job)
    function = call_job.load(job.function)
    with Entered(seat.rank) if seat.backend.is_watched else contextlib.nullcontext():
        value = function(seat.rank, seat.world, wire.unpack(payload))
    workplace.leave()
    return value


def _install_faulthandler(seat: WorkerConfig) -> None:
    faulthandler.enable(file=seat.stacks_fd, all_threads=True)
    faulthandler.unregister(signal.SIGUSR1)  # or register leaves a handler there that took its place
    faulthandler.register(signal.SIGUSR1, file=seat.stacks_fd, all_threads=True)


def _send_output_to(target: int | None) -> None:
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
    data, ancillary, _, _ = connection.recvmsg(wire.HEAD.size, socket.CMSG_SPACE(4 * MAX_RANKS))
    if not data:
        raise _HungUp
    fds = array.array("i")
    for _, _, part in ancillary:
        fds.frombytes(part[: len(part) // 4 * 4])
    count = wire.count(data + _exactly(connection, wire.HEAD.size - len(data)))
    sizes = wire.lengths(_exactly(connection, count * wire.LENGTH_BYTES))
    return [_exactly(connection, size) for size in sizes], fds.tolist()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise _HungUp
        view = view[received:]
    return data


# What all jobs of a rank stand on, and no job can be given back once another has taken it away.


_LIMITS = tuple(sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")))
_STANDARD = (0, 1, 2)


class Footing:
    """Descriptors 0 to 2 and ``fds``, the default process group, Python's output, and resource limits, as they are now."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = {fd: _file(fd) for fd in (*_STANDARD, *fds)}
        self._group = dist.group.WORLD
        self._limits = [resource.getrlimit(one) for one in _LIMITS]

    def lost(self) -> str:
        """What has changed since, so that the process is of no use to other jobs; "" if nothing has."""
        changed = [str(fd) for fd, file in self._files.items() if _file(fd) != file]
        if changed:
            return f"descriptor {', '.join(changed)} was closed or replaced"
        if dist.group.WORLD is not self._group:
            return "the default process group was destroyed or replaced"
        if not _takes_text():
            return "sys.stdout or sys.stderr was closed"
        if [resource.getrlimit(one) for one in _LIMITS] != self._limits:
            return "a resource limit was changed"
        return ""


def _file(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _takes_text() -> bool:
    try:
        return not (sys.stdout.closed or sys.stderr.closed)
    except ValueError:  # of a stream that was detached
        return False
