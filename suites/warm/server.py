"""The process from which runs are forked, ``python -m suites.warm.server FD PPID``: it has imported what they would.

Of what runs import it leaves out pytest's plugins, whose asserts pytest rewrites when it imports them itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import pytest_fxbucket
from pytest_fxbucket.ranks.call_job import die_with, ignore_interrupts
from suites.warm.spare import stand_beside

MESSAGE_BYTES = 1 << 20
"""An environment and a command line have room in it."""
_PR_SET_CHILD_SUBREAPER = 36
MODULES = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.proxy_tensor",
    "numpy.random",
)
PLUGINS = ("pytest_fxbucket.pytest_plugin", "pytest_fxbucket.cli.__main__")


@dataclass(frozen=True)
class Start:
    """What Python is called with, where, and its environment."""

    words: Sequence[str]
    folder: str
    environ: dict[str, str]


def main(fd: int, parent: int) -> None:
    """Fork one run after another for the process at the other end, until that hangs up."""
    ignore_interrupts()
    die_with(parent)
    # What a run leaves behind becomes a child of this process, which others can see.
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    for name in (*MODULES, *_ours()):
        importlib.import_module(name)
    # pytest says of whole distributions that they are not rewritten, unless they say so themselves.
    pytest_fxbucket.__doc__ = f"{pytest_fxbucket.__doc__} PYTEST_DONT_REWRITE"
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads, where only one can fork safely"
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=fd))


def serve(connection: socket.socket) -> None:
    """Fork what is asked for, with its standard streams and a socket for its process id and, in the end, its status."""
    own = os.getpid()
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([connection, *running], [], [])
        for handle in ready:
            if handle is not connection:
                pid, reply = running.pop(handle)
                reply.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                reply.close()
                os.close(handle)
        if connection in ready:
            data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                for one in (connection, *(reply for _, reply in running.values())):
                    one.close()
                die_with(own)
                _become(pickle.loads(data), fds)
            reply = socket.socket(fileno=fds.pop())
            for one in fds:
                os.close(one)
            reply.send(pickle.dumps(pid))
            running[os.pidfd_open(pid)] = pid, reply


def _ours() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages(pytest_fxbucket.__path__, "pytest_fxbucket."))
    return [name for name in found if not name.startswith(PLUGINS)]


def _become_worker(words: Sequence[str], fds: Sequence[int]) -> NoReturn:
    """Be a worker of the run beside which this process waited: what is not said is as there."""
    _become(Start(words, os.getcwd(), dict(os.environ)), fds)


def _become(start: Start, fds: Sequence[int]) -> NoReturn:
    """Be the Python that was asked for, to its end."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update(start.environ)
        for number, one in enumerate(fds[:3]):
            os.dup2(one, number)
        for one in fds:
            os.close(one)
        stand_beside(start.words, _become_worker)
        sys.path[:] = [*start.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
        status = _run(start.words)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _run(words: Sequence[str]) -> int:
    """Run a module, a file or code, as Python does; its exit status."""
    sys.argv = list(words)
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
