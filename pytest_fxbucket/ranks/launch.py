"""Starting the fork server, having it fork the processes of a pool, and how many of them this machine has room for."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.flight_recorder import FlightRecords
from pytest_fxbucket.ranks.messages import ForkedRanks, PoolRequest, RankExited, ServerReady
from pytest_fxbucket.ranks.server import MESSAGE_BYTES
from pytest_fxbucket.ranks.stacks import process_state, read_from, send

START_LIMIT_S, FORK_LIMIT_S = 120.0, 30.0
_END_LIMIT_S = 5.0
# Libraries that start threads when they are imported would make forking unsafe.
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

_Message = TypeVar("_Message")


class ForkServer:
    """The server process, started at once; it imports torch, then the modules ``warm``, while the parent does other things."""

    def __init__(self, warm: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = os.memfd_create("fxbucket-server", os.MFD_CLOEXEC)
        self._connection, self._ready = ours, False
        with theirs:
            self._process = subprocess.Popen(
                # Without -P, -m would put the working directory in front of the parent's own path.
                [sys.executable, "-P", "-m", "pytest_fxbucket.ranks.server", str(theirs.fileno()), str(os.getpid()), *warm],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(import_path())},
                # Out of the terminal's process group: Ctrl-C is for the parent, which ends the ranks.
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def late(self, what: str, limit_s: float, guess: str) -> RankError:
        """The error that the server did not ``what`` within ``limit_s`` seconds: it is stopped, or else ``guess``."""
        pid = self._process.pid
        why = "it is stopped (SIGSTOP, a debugger)" if process_state(pid) == "T" else guess
        return RankError(f"the rank server (process {pid}) did not {what} within {limit_s:g} s: {why}")

    def fork(self, request: PoolRequest, descriptors: Sequence[int]) -> None:
        """Ask for a pool; the answer comes on its control socket. Raises RankError when the server cannot start."""
        self._wait_until_ready()
        self._connection.settimeout(FORK_LIMIT_S)
        try:
            socket.send_fds(self._connection, [pickle.dumps(request)], list(descriptors))
        except TimeoutError:
            raise self.late("take a request", FORK_LIMIT_S, "it does not answer") from None
        except OSError as error:
            raise RankError(f"the rank server ended unexpectedly ({self._last_words()})") from error

    def close(self) -> None:
        """End the server and every rank of it; idempotent."""
        self._connection.close()
        try:
            # The server ends when its connection does, but one that is stopped never would.
            self._process.wait(0 if process_state(self._process.pid) == "T" else _END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel's business now
                self._process.wait(_END_LIMIT_S)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        message = receive(self._connection, ServerReady, START_LIMIT_S)
        # A silent connection means that the limit is over; a closed one is readable, and the log says why.
        if message is None and self.is_alive and not is_ready(self._connection.fileno()):
            raise self.late("start", START_LIMIT_S, "importing torch takes too long")
        problem = self._last_words() if message is None else message.problem
        if problem:
            raise RankError(f"the rank server could not start: {problem}")
        self._ready = True

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        lines = [line for line in read_from(self._log).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit status {self._process.returncode}"


class PoolProcesses:
    """The processes of one pool, forked and counted; they join their group while the caller goes on.

    Process number i of them is rank ``ranks[i]``; there is a flight record of each rank of the world, also of those elsewhere.
    """

    def __init__(self, server: ForkServer, request: PoolRequest) -> None:
        self.ranks = request.ranks
        self.records = FlightRecords(request.world)
        self.oom_kills = oom_kills()
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair() for _ in self.ranks]
        self.connections = [ours for ours, _ in pairs]
        self.stack_files = [os.memfd_create("fxbucket-stacks", os.MFD_CLOEXEC) for _ in self.ranks]
        self.pids: tuple[int, ...] = ()
        self.pidfds: list[int] = []
        descriptors = [control.fileno(), self.records.fd]
        for (_, theirs), stacks in zip(pairs, self.stack_files, strict=True):
            descriptors += [theirs.fileno(), stacks]
        try:
            server.fork(request, descriptors)
            # As long as we have a copy of a rank's end, we cannot see that the rank hung up.
            for end in (control, *(theirs for _, theirs in pairs)):
                end.close()
            self._receive_pids(server)
        except BaseException:
            for end in (control, *(theirs for _, theirs in pairs)):
                end.close()
            self.close()
            raise

    def is_whole(self) -> bool:
        """Whether every process lives."""
        return not _ready(self.pidfds, 0)

    def exit_statuses(self, expected: Sequence[int], limit_s: float = 10.0) -> dict[int, int]:
        """Exit codes of processes that ended (negative: a signal), waiting for those ``expected``."""
        found: dict[int, int] = {}
        deadline = time.monotonic() + limit_s
        while not set(expected) <= set(found):
            message = receive(self.control, RankExited, deadline - time.monotonic())
            if message is None:
                break
            found[message.index] = message.status
        return found

    def close(self) -> None:
        """Kill what lives, and wait until it is gone; idempotent."""
        for pidfd in self.pidfds:
            send(pidfd, signal.SIGKILL)
        deadline = time.monotonic() + _END_LIMIT_S
        left = set(self.pidfds)
        while left and (ended := _ready(sorted(left), deadline - time.monotonic())):
            left -= ended
        self.control.close()
        for connection in self.connections:
            connection.close()
        for fd in (*self.pidfds, *self.stack_files):
            os.close(fd)
        self.pidfds, self.stack_files = [], []
        self.records.close()

    def _receive_pids(self, server: ForkServer) -> None:
        if not is_ready(self.control.fileno(), FORK_LIMIT_S):
            raise server.late(f"fork {len(self.ranks)} ranks", FORK_LIMIT_S, "it does not answer")
        data, fds, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, len(self.ranks))
        message = pickle.loads(data) if data else ForkedRanks((), "it ended while it forked the ranks")
        self.pids, self.pidfds = message.pids, list(fds)
        if message.problem:
            raise RankError(f"the rank server could not fork {len(self.ranks)} ranks ({message.problem})")


def receive(connection: socket.socket, kind: type[_Message], limit_s: float) -> _Message | None:
    """The next message, of type ``kind``; None when the peer is gone or ``limit_s`` seconds passed."""
    if not is_ready(connection.fileno(), limit_s):
        return None
    try:
        data = connection.recv(MESSAGE_BYTES)
    except ConnectionError:
        return None
    message = pickle.loads(data) if data else None
    return message if isinstance(message, kind) else None


def import_path() -> list[str]:
    """The parent's import path, with the working directory spelled out."""
    return [os.path.abspath(entry) for entry in sys.path]


def is_ready(fd: int, limit_s: float = 0.0) -> bool:
    """Whether ``fd`` can be read, or is that of a process which has ended, within ``limit_s`` seconds."""
    return bool(_ready([fd], limit_s))


def _ready(fds: Sequence[int], limit_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0, int(limit_s * 1000)))}


# How many rank processes may live side by side on this machine, and how many threads each may have.


# What an idle rank holds of its own beyond what it shares with the fork server, and what a small plan's rank takes at work.
_BYTES_PER_RANK = 256 << 20
_PER_CORE = 8
_ALWAYS = 4


def threads_per_rank(world: int, environ: Mapping[str, str], cores: int | None = None) -> int:
    """Threads for each of ``world`` ranks such that those of all xdist workers together fit the cores; at least 1."""
    return max(1, _cores(cores) // (world * workers(environ)))


def most_processes(environ: Mapping[str, str], cores: int | None = None, available_bytes: int | None = None) -> int:
    """Rank processes that one pytest process keeps: its share of 8 a core, and of what half of the free memory holds."""
    memory = available_memory() if available_bytes is None else available_bytes
    fit = min(_PER_CORE * _cores(cores), memory // 2 // _BYTES_PER_RANK)
    return max(_ALWAYS, fit // workers(environ))


def workers(environ: Mapping[str, str]) -> int:
    """Workers of pytest-xdist that share this machine; 1 without xdist."""
    text = environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return max(1, int(text)) if text.isdigit() else 1


def available_memory() -> int:
    """Bytes that new processes may take: what the machine has free, and no more than the control group allows."""
    free = _number(Path("/proc/meminfo"), "MemAvailable:") * 1024 or 1 << 62
    # Where there is no limit the file says "max", which reads as 0.
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    return min(free, max(0, limit - used)) if limit else free


def oom_kills() -> int:
    """Processes of this control group that the kernel ended for lack of memory so far; 0 where it does not say."""
    return _number(Path("/sys/fs/cgroup/memory.events"), "oom_kill ")


def _number(path: Path, key: str = "") -> int:
    try:
        text = path.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(key):
            word = line[len(key) :].split()[0] if line[len(key) :].split() else ""
            return int(word) if word.isdigit() else 0
    return 0


def _cores(cores: int | None) -> int:
    return cores if cores is not None else len(os.sched_getaffinity(0))
