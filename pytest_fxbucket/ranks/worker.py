"""A rank: joins the group, then runs one job after another until the parent hangs up."""

from __future__ import annotations

import array
import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.compat.gloo import gather_one_by_one
from pytest_fxbucket.compat.groups import destroy_subgroups
from pytest_fxbucket.ranks import ledger, ordered, wire
from pytest_fxbucket.ranks.backend import PLAIN, use_device
from pytest_fxbucket.ranks.fresh import Workplace
from pytest_fxbucket.ranks.gpus import nccl
from pytest_fxbucket.ranks.gpus.entered import Entered
from pytest_fxbucket.ranks.messages import Job, PoolRequest, Reply, StoreAddress

# Longer than any job: the parent is the one that looks at the clock.
_NEVER = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Seat:
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


def serve(seat: Seat) -> None:
    """Answer jobs over `seat.connection`; returns when the parent hangs up."""
    sys.dont_write_bytecode = True
    faulthandler.enable(file=seat.stacks_fd, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=seat.stacks_fd, all_threads=True)
    ledger.adopt(seat.ledgers_fd, seat.world)
    ledger.act_as(seat.rank)
    use_device(seat.request.devices[seat.index])
    os.environ.update(seat.settings)
    try:
        if seat.request.backend:
            _join(seat)
        ledger.settle()
        workplace = Workplace(seat.request.threads, seat.is_at_home, seat.request.backend, seat.settings)
        _send(seat.connection, Reply("ready", time.monotonic()))
        while True:
            _one_job(seat, workplace)
    except (_HungUp, ConnectionError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            _send(seat.connection, _raised(error))


def _join(seat: Seat) -> None:
    if seat.is_at_home:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _store(seat, seat.request.store)
    if seat.request.backend == "nccl":
        nccl.join(store, seat.rank, seat.world, _NEVER)
        return
    if seat.request.backend == PLAIN:
        backend = "gloo"
        gather_one_by_one()
    else:
        backend = ordered.BACKEND
        ordered.register()
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world, timeout=_NEVER)


def _store(seat: Seat, address: StoreAddress | None) -> c10d.Store:
    if address is None:
        return c10d.FileStore(f"/proc/self/fd/{seat.store_fd}", seat.world)
    store = c10d.TCPStore(address.host, address.port, is_master=False)
    return c10d.PrefixStore(address.prefix, store)


def _one_job(seat: Seat, workplace: Workplace) -> None:
    buffers, output = _receive(seat.connection)
    payload, _ = _receive(seat.connection)
    job = cast(Job, wire.unpack(buffers))
    # Only now is it sure that every rank is through with them.
    destroy_subgroups()
    _send_output_to(output)
    reply, result = _run(seat, workplace, job, payload)
    _send_output_to(None)
    _send(seat.connection, reply, result)


def _run(seat: Seat, workplace: Workplace, job: Job, payload: list[wire.Buffer]) -> tuple[Reply, list[wire.Buffer]]:
    try:
        workplace.enter(job)
        function = _load(job.function)
        with Entered(seat.rank) if seat.request.backend == "nccl" else contextlib.nullcontext():
            value = function(seat.rank, seat.world, wire.unpack(payload))
        workplace.leave()
    except wire.Unpicklable as error:
        return Reply("unpicklable", time.monotonic(), error=f"its payload cannot be read ({error})"), []
    except BaseException as error:  # SystemExit from a user's code is a failure like any other
        return _raised(error), []
    try:
        buffers = wire.pack(value)
    except wire.Unpicklable as error:
        text = f"its result, of type {type(value).__name__}, cannot be pickled ({error})"
        return Reply("unpicklable", time.monotonic(), error=text), []
    return Reply("returned", time.monotonic()), buffers


def _load(name: str) -> Callable[[int, int, object], object]:
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return cast("Callable[[int, int, object], object]", found)


def _raised(error: BaseException) -> Reply:
    text = "".join(traceback.format_exception(_without_our_frames(error)))
    line = str(error).strip().partition("\n")[0]
    return Reply("raised", time.monotonic(), error=line, error_type=type(error).__name__, traceback=text)


def _without_our_frames(error: BaseException) -> BaseException:
    """From the job on; what a job puts around a user's function hides itself, as pytest's own frames do."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or trace.tb_frame.f_locals.get("__tracebackhide__") is True
    ):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _send_output_to(target: int | None) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(os.devnull, os.O_WRONLY) if target is None else target
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _send(connection: socket.socket, reply: Reply, result: list[wire.Buffer] | None = None) -> None:
    buffers = [*wire.pack(reply), *(result or [])]
    connection.sendall(wire.head(buffers))
    for buffer in buffers:
        connection.sendall(buffer)


def _receive(connection: socket.socket) -> tuple[list[wire.Buffer], int | None]:
    """One frame, and the descriptor that came with it."""
    data, ancillary, _, _ = connection.recvmsg(wire.COUNT.size, socket.CMSG_SPACE(4))
    if not data:
        raise _HungUp
    fds = array.array("i")
    for _, _, part in ancillary:
        fds.frombytes(part[:4])
    (count,) = wire.COUNT.unpack(data + _exactly(connection, wire.COUNT.size - len(data)))
    sizes = wire.lengths(_exactly(connection, count * wire.LENGTH_BYTES))
    return [_exactly(connection, size) for size in sizes], fds[0] if fds else None


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise _HungUp
        view = view[received:]
    return data
