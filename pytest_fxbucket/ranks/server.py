"""The fork server, ``python -m pytest_fxbucket.ranks.server FD PPID [MODULE ...]``: imports them and torch, forks ranks.

It has one thread, for ever, and forks only then: an OpenMP region before a fork would hang the ranks. It ends, and its ranks
with it, when the parent hangs up or dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from typing import NoReturn, cast

from pytest_fxbucket.ranks.call_job import die_with, ignore_interrupts
from pytest_fxbucket.ranks.messages import ForkedRanks, PoolRequest, RankExited, ServerReady

MESSAGE_BYTES = 65536
MAX_DESCRIPTORS = 250
# Imported while there is nothing else to do, since every rank would import them on its own otherwise.
_WHEN_IDLE = (
    "pytest_fxbucket.process.torch_settings",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.fake_tensor",
)


@dataclass(slots=True)
class _ForkedPool:
    """The processes of one pool: their ids and pidfds, and the socket that tells the pool of their ends."""

    control: socket.socket
    processes: dict[int, int] = field(default_factory=dict)  # pidfd -> which of the pool's
    pids: dict[int, int] = field(default_factory=dict)  # pidfd -> pid

    def kill(self) -> None:
        for pidfd in self.processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd, pid in self.pids.items():
            os.waitpid(pid, 0)
            os.close(pidfd)
        self.processes.clear()
        self.pids.clear()
        self.control.close()

    def reap(self, pidfd: int) -> None:
        _, status = os.waitpid(self.pids.pop(pidfd), 0)
        os.close(pidfd)
        message = RankExited(self.processes.pop(pidfd), os.waitstatus_to_exitcode(status))
        with contextlib.suppress(OSError):
            self.control.send(pickle.dumps(message))


class Server:
    """Forks pools of ranks for the parent at the other end of ``connection`` (SOCK_SEQPACKET)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pools: list[_ForkedPool] = []
        self._idle = list(_WHEN_IDLE)

    def serve(self) -> None:
        """Answer until the parent hangs up; then kill all ranks."""
        try:
            while self._step():
                pass
        finally:
            for pool in self._pools:
                pool.kill()

    def _step(self) -> bool:
        ready = self._wait()
        # One module for each look at the sockets, so that a request waits for one import at most.
        if not ready and self._idle:
            _import(self._idle.pop(0))
        for pool in list(self._pools):
            for pidfd in [fd for fd in pool.processes if fd in ready]:
                pool.reap(pidfd)
            # A pool sends nothing here: the socket is readable once the pool has closed its end, or died.
            if pool.control.fileno() in ready:
                pool.kill()
                self._pools.remove(pool)
        return self._connection.fileno() not in ready or self._answer()

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        for pool in self._pools:
            poll.register(pool.control, select.POLLIN)
            for pidfd in pool.processes:
                poll.register(pidfd, select.POLLIN)
        return {fd for fd, _ in poll.poll(0 if self._idle else None)}

    def _answer(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not data:
            return False
        request = cast(PoolRequest, pickle.loads(data))
        pool = _ForkedPool(socket.socket(fileno=fds[0]))
        self._pools.append(pool)
        if request.module:
            _import(request.module)  # what it raises is for a rank to tell
        problem = _why_not_fork()
        if not problem:
            self._fork_all(pool, request, fds[1], fds[2:])
        for fd in fds[1:]:
            os.close(fd)
        message = ForkedRanks(tuple(pool.pids.values()), problem)
        socket.send_fds(pool.control, [pickle.dumps(message)], list(pool.pids))
        return True

    def _fork_all(self, pool: _ForkedPool, request: PoolRequest, records_fd: int, fds: list[int]) -> None:
        # Opened by name in each rank, so that it vanishes with the last of them.
        store_fd = os.memfd_create("fxbucket-store", os.MFD_CLOEXEC)
        # Frozen objects are not visited by the ranks' collectors, which would write to their pages and so copy them.
        gc.collect()
        gc.freeze()
        parent = os.getpid()
        for index in range(len(request.ranks)):
            pid = os.fork()
            if pid == 0:
                self._become(parent, index, request, [records_fd, store_fd, fds[2 * index], fds[2 * index + 1]])
            pidfd = os.pidfd_open(pid)
            pool.processes[pidfd], pool.pids[pidfd] = index, pid
        os.close(store_fd)

    def _become(self, parent: int, index: int, request: PoolRequest, keep: list[int]) -> NoReturn:
        try:
            # Ends by os._exit in any case: the server's loop, its finally blocks and exit handlers are not for this process.
            die_with(parent)
            _close_all_but([0, 1, 2, *keep])
            from pytest_fxbucket.ranks.worker import WorkerConfig, serve

            records_fd, store_fd, connection, stacks_fd = keep
            serve(WorkerConfig(request, index, socket.socket(fileno=connection), records_fd, store_fd, stacks_fd))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _close_all_but(keep: list[int]) -> None:
    """Close what the other ranks and pools need: a peer's death must not be hidden by our copy of its socket."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _why_not_fork() -> str:
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"the server has {threads} threads where it must have one to fork safely"


def _import(name: str) -> str:
    """Import ``name``. Returns a sentence if there is no such module; other errors are left to a rank, whose job imports it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return f"there is no module {name}, which it has to import before it forks ranks"
    except Exception:  # of a newer torch, say; the rank that needs it raises it again
        pass
    return ""


def _import_torch(warm: list[str]) -> str:
    """Import torch, the worker and the modules ``warm`` once for all ranks. Returns why that failed, or ""."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return f"{type(error).__name__}: {error}; expected a torch that can be imported"
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch has no gloo; expected one that was built with it"
    torch.set_num_threads(1)
    importlib.import_module("pytest_fxbucket.ranks.worker")
    for name in warm:
        if problem := _import(name):
            return problem
    return _why_not_fork()


def main(arguments: list[str]) -> None:
    """Serve over the inherited SOCK_SEQPACKET descriptor arguments[0] for the process arguments[1]; the rest are modules."""
    ignore_interrupts()
    die_with(int(arguments[1]))
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # a text stream, here
    connection = socket.socket(fileno=int(arguments[0]))
    problem = _import_torch(arguments[2:])
    with contextlib.suppress(BrokenPipeError):
        connection.send(pickle.dumps(ServerReady(problem)))
        if not problem:
            Server(connection).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
