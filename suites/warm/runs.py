"""Runs of Python by processes that are forked from one with torch imported, started and ended as subprocess does it.

For tests of what a run does. What its start does (imports, entry points, workers of xdist) is a new process's to show.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from suites.pytest_plugin.processes import below, ends
from suites.warm.server import MESSAGE_BYTES, Start

ROOT = Path(__file__).parents[2]


class WarmRuns:
    """The process that forks them, which is started with the first."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str], folder: Path, environ: Mapping[str, str], out: IO[Any], err: IO[Any]) -> WarmRun:
        """Start ``python WORDS`` there; it has no standard input."""
        data = pickle.dumps(Start([*words], str(folder), dict(environ)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "rb") as nothing:
            fds = [file.fileno() for file in (nothing, out, err, theirs)]
            socket.send_fds(self._started(), [data], fds)
        return WarmRun(ours, pickle.loads(ours.recv(MESSAGE_BYTES)))

    def run(self, words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` there to its end."""
        with open(os.memfd_create("out"), "w+") as out, open(os.memfd_create("err"), "w+") as err:
            status = self.start(words, folder, environ, out, err).wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([*words], status, out.read(), err.read())

    def left(self) -> list[int]:
        """Processes that runs started and left behind; what was told to end may take a moment."""
        return [] if self._process is None else [pid for pid in below(self._process.pid) if not ends(pid)]

    def close(self) -> None:
        """End it; idempotent."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.wait()
            self._connection = self._process = None

    def _started(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "suites.warm.server", str(theirs.fileno()), str(os.getpid())]
                environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FXBUCKET_SUITE")}
                self._process = subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()])
        return self._connection


@dataclass
class WarmRun:
    """What subprocess.Popen is to a process that it started."""

    _connection: socket.socket
    pid: int
    returncode: int | None = None
    stdin: None = None
    """As pytester asks for it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self.returncode = pickle.loads(self._connection.recv(MESSAGE_BYTES))
            self._connection.close()
        return int(self.returncode)

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def of_pytester(runs: WarmRuns, pytester: pytest.Pytester) -> Callable[..., Any]:
    """What ``pytester.popen`` is where ``runpytest_subprocess`` starts a warm run; whatever else starts as always."""
    cold = pytester.popen

    def popen(command: Sequence[str], stdout: IO[Any], stderr: IO[Any], stdin: object) -> Any:
        if command[1] != "-mpytest" or stdin is not pytester.CLOSE_STDIN:
            return cold(command, stdout, stderr, stdin)
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        environ = {**os.environ, "PYTHONPATH": path}
        return runs.start(["-m", "pytest", *command[2:]], Path.cwd(), environ, stdout, stderr)

    return popen
