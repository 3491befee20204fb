"""What a job may change of the interpreter in its rank, to be put back when it is through.

Nothing but the rank uses it: where others have timers, tracers and handlers of their own, as in pytest's process, it would take
them away (see pytest_fxbucket/process_state.py for what is put back there).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OF_SYS = ("stdin", "stdout", "stderr", "displayhook", "excepthook", "unraisablehook")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Streams and hooks of `sys`, signal handlers, umask, recursion limit, and the garbage collector's settings."""

    of_sys: tuple[Any, ...]
    thread_hook: Callable[..., object]
    handlers: dict[signal.Signals, Any]
    umask: int
    recursion_limit: int
    collects: tuple[bool, tuple[int, int, int]]

    @classmethod
    def take(cls) -> Interpreter:
        """That of this process as it is now. Call it from the main thread."""
        return cls(
            tuple(getattr(sys, name) for name in _OF_SYS),
            threading.excepthook,
            _handlers(),
            _umask(),
            sys.getrecursionlimit(),
            (gc.isenabled(), gc.get_threshold()),
        )

    def put_back(self, install_faulthandler: Callable[[], None]) -> None:
        """Let the process have this state again, and no timer or tracer; call it from the main thread.

        `install_faulthandler` is called if a job had signal handlers of its own, which may have been in its place.
        """
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


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):  # whatever a job has put there
        stream.flush()
