"""Processes beside a run, forked with it, that become what it starts and what would import torch anew.

One becomes the fork server of its ranks, others its workers of pytest-xdist.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from pytest_fxbucket.ranks import launch, server
from pytest_fxbucket.ranks.call_job import die_with, ignore_interrupts

_SERVER = [sys.executable, "-P", "-m", "pytest_fxbucket.ranks.server"]
_WORKER = [sys.executable, "-u", "-c"]
_MESSAGE_BYTES = 1 << 20

Become = Callable[[Any, Sequence[int]], NoReturn]
"""What a spare process does with what it is sent and the descriptors that come with it."""


def stand_beside(words: Sequence[str], become_worker: Become) -> None:
    """Fork the spare processes of a run of ``words``, and be there where it starts such ones; later ones start as always."""
    ranks = [Spare(_become_server)]
    workers = [Spare(become_worker) for _ in range(_workers(words))]

    def start_server(command: Sequence[str], **given: Any) -> Any:
        if not ranks or list(command[:4]) != _SERVER:
            return subprocess.Popen(command, **given)
        return ranks.pop().take((command[5:], given["env"]), [given["stdout"], *given["pass_fds"]])

    def start_worker(command: Sequence[str], **given: Any) -> Any:
        if not workers or list(command[:3]) != _WORKER:
            return subprocess.Popen(command, **given)
        (stdin, to_stdin), (from_stdout, stdout) = os.pipe(), os.pipe()
        spare = workers.pop().take(["-c", *command[3:]], [stdin, stdout])
        for fd in (stdin, stdout):
            os.close(fd)
        spare.stdin, spare.stdout = os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb")
        return spare

    launch.subprocess = _with_popen(start_server)  # type: ignore[assignment]  # which asks nothing else of it
    if workers:
        from execnet.gateway_base import ThreadExecModel

        ThreadExecModel.subprocess = _with_popen(start_worker)


def _with_popen(start: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _workers(words: Sequence[str]) -> int:
    found = re.search(r"(?:^| )-n ?(\d+)", " ".join(words))
    return int(found[1]) if found else 0


class Spare:
    """A process that waits to be told what to become."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, become: Become) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            _wait(theirs, parent, become)
        theirs.close()
        self.returncode: int | None = None

    def take(self, told: Any, fds: Sequence[int]) -> Spare:
        """Have it become what ``told`` says; it is then what subprocess.Popen is to a process that it started."""
        socket.send_fds(self._connection, [pickle.dumps(told)], fds)
        return self

    def poll(self) -> int | None:
        """As that of subprocess.Popen."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As that of subprocess.Popen."""
        if self.poll() is None:
            handle = os.pidfd_open(self.pid)
            ended = select.select([handle], [], [], timeout)[0]
            os.close(handle)
            if not ended:
                raise subprocess.TimeoutExpired(_SERVER, timeout or 0.0)
        self.poll()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """As that of subprocess.Popen."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _wait(connection: socket.socket, parent: int, become: Become) -> NoReturn:
    """Wait for what to become, and be it, or end as the run ends."""
    status = 1
    try:
        ignore_interrupts()
        die_with(parent)
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
        if data:
            become(pickle.loads(data), fds)
        status = 0
    finally:
        os._exit(status)


def _become_server(told: tuple[Sequence[str], Mapping[str, str]], fds: Sequence[int]) -> NoReturn:
    arguments, environ = told
    log, connection = fds
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, one in enumerate((nothing, log, log)):
        os.dup2(one, number)
    path = environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*path, *(one for one in sys.path if one not in path)]
    server.main([str(connection), *arguments])
    os._exit(0)
