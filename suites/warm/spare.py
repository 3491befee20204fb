"""A process beside a run, forked with it, that becomes the fork server of its ranks, which would import torch anew."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from pytest_fxbucket.ranks import launch, server
from pytest_fxbucket.ranks.call_job import die_with, ignore_interrupts

_SERVER = [sys.executable, "-P", "-m", "pytest_fxbucket.ranks.server"]
_MESSAGE_BYTES = 1 << 20


class Spare:
    """The first fork server that this process starts; later ones are processes of their own, as always."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            _wait(theirs, parent)
        theirs.close()
        self.returncode: int | None = None
        self._is_taken = False

    def serve_launches(self) -> None:
        """Be there where the plugin starts its fork server."""
        launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": self._popen})  # type: ignore[assignment]

    def _popen(self, command: Sequence[str], **given: Any) -> Any:
        if self._is_taken or list(command[:4]) != _SERVER:
            return subprocess.Popen(command, **given)
        self._is_taken = True
        (fd,) = given["pass_fds"]
        data = pickle.dumps((command[5:], given["env"]))
        socket.send_fds(self._connection, [data], [given["stdout"], fd])
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


def _wait(connection: socket.socket, parent: int) -> NoReturn:
    """Wait for what a fork server is started with, and be one."""
    status = 1
    try:
        ignore_interrupts()
        die_with(parent)
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
        status = _serve(*pickle.loads(data), *fds) if data else 0
    finally:
        os._exit(status)


def _serve(arguments: Sequence[str], environ: Mapping[str, str], log: int, connection: int) -> int:
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, one in enumerate((nothing, log, log)):
        os.dup2(one, number)
    path = environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*path, *(one for one in sys.path if one not in path)]
    server.main([str(connection), *arguments])
    return 0
