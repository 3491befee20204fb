"""Make a rank look like a new process before each job: paths, environment, torch's global state, the user's changed modules."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.process.state import reset, umask
from pytest_fxbucket.ranks.messages import Job, PoolRequest
from pytest_fxbucket.ranks.process_groups import nccl

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]


class JobEnvironment:
    """What a job finds in its rank's process, and which of the user's modules earlier jobs have loaded there."""

    def __init__(self, request: PoolRequest, settings: Mapping[str, str]) -> None:
        self._request, self._settings = request, settings
        self._first = frozenset(sys.modules)
        self._roots: tuple[str, ...] = ()
        self._seen: set[str] = set()
        self._stamps: dict[str, tuple[str, int, int]] = {}

    def enter(self, job: Job) -> None:
        """Enter the job's directory, environment and import path, with fresh state."""
        os.environ.clear()
        os.environ.update(job.environ)
        if self._request.is_at_home:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # After the job's own variables: a rank's GPU and its repeatable sums are not for a job to choose.
        os.environ.update(self._settings)
        os.chdir(job.cwd)
        roots = tuple(os.path.realpath(path) for path in job.paths)
        sys.path[:] = [*job.paths, *job.sys_path]
        if roots != self._roots or any(_stamp(path) != (size, time) for path, size, time in self._stamps.values()):
            self._forget_users()
        self._roots = roots
        # The path finders remember what folders held: a module that was written since the last job would not be found.
        importlib.invalidate_caches()
        if torch.get_num_threads() != self._request.threads:
            torch.set_num_threads(self._request.threads)
        reset()
        nccl.apply(self._request.backend)

    def leave(self) -> None:
        """Remember which of the user's modules the job loaded, and their files as they are now.

        The user's are those that lie under the job's paths; packages installed there, and our own, do not count.
        """
        for name in sys.modules.keys() - self._first - self._seen:
            path = _location(sys.modules[name])
            if path is not None and name.partition(".")[0] != _OURS and _lies_under(path, self._roots):
                self._stamps[name] = (path, *_stamp(path))
            self._seen.add(name)

    def _forget_users(self) -> None:
        # All of them: one that did not change may hold names from one that did.
        for name in self._stamps:
            sys.modules.pop(name, None)
        self._stamps.clear()
        self._seen.clear()


def _location(module: object) -> str | None:
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return os.path.realpath(path) if isinstance(path, str) else None


def _lies_under(path: str, roots: Sequence[str]) -> bool:
    return any(
        path.startswith(root.rstrip(os.sep) + os.sep) and not _INSTALLED.intersection(_parts_below(path, root))
        for root in roots
    )


def _parts_below(path: str, root: str) -> Iterable[str]:
    return Path(path[len(root) :]).parts


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (-1, -1)
    return (found.st_size, found.st_mtime_ns)


# State of the interpreter that a job may change in its rank, put back after the job.
#
# For ranks only. In a process where others have timers, tracers and handlers, such as pytest's, it would take these away; what
# is put back there is in process/state.py.


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_SYS = ("stdin", "stdout", "stderr", "displayhook", "excepthook", "unraisablehook")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Streams and hooks of ``sys``, signal handlers, umask, recursion limit, and the garbage collector's settings."""

    of_sys: tuple[Any, ...]
    thread_hook: Callable[..., object]
    handlers: dict[signal.Signals, Any]
    umask: int
    recursion_limit: int
    collects: tuple[bool, tuple[int, int, int]]

    @classmethod
    def take(cls) -> Interpreter:
        """The state of this process as it is now. Call it from the main thread."""
        return cls(
            tuple(getattr(sys, name) for name in _OF_SYS),
            threading.excepthook,
            _handlers(),
            umask(),
            sys.getrecursionlimit(),
            (gc.isenabled(), gc.get_threshold()),
        )

    def put_back(self, install_faulthandler: Callable[[], None]) -> None:
        """Give the process this state again, and no timer or tracer; call it from the main thread.

        ``install_faulthandler`` is called if a job installed signal handlers, which may have replaced those of faulthandler.
        """
        # Before handlers are put back: an alarm of the job's that strikes then would end the rank.
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        sys.settrace(None)
        sys.setprofile(None)
        for name, value in zip(_OF_SYS, self.of_sys, strict=True):
            if getattr(sys, name) is not value:
                _flush(getattr(sys, name))
                setattr(sys, name, value)
        threading.excepthook = self.thread_hook
        changed = {number for number, handler in _handlers().items() if handler != self.handlers[number]}
        for number in changed:
            with contextlib.suppress(TypeError):  # None: a handler that Python did not install, and cannot
                signal.signal(number, self.handlers[number])
        if changed or not faulthandler.is_enabled():
            install_faulthandler()
        os.umask(self.umask)
        sys.setrecursionlimit(self.recursion_limit)
        is_enabled, threshold = self.collects
        gc.set_threshold(*threshold)
        (gc.enable if is_enabled else gc.disable)()


def _handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in signal.Signals}


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # whatever a job has put there
        stream.flush()


# State that all jobs of a rank depend on, and that cannot be restored once a job has changed it.


_LIMITS = tuple(sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")))
_STANDARD = (0, 1, 2)


class SharedState:
    """Descriptors 0 to 2 and ``fds``, the default process group, Python's output, and resource limits, as they are now."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._files = {fd: _file(fd) for fd in (*_STANDARD, *fds)}
        self._group = dist.group.WORLD
        self._limits = [resource.getrlimit(one) for one in _LIMITS]

    def lost(self) -> str:
        """What a job has changed, so that the process is of no use to other jobs; "" if nothing."""
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
