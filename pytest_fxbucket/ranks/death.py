"""Dying with the parent: the kernel kills this process when the thread that started it ends, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have this process killed when process `parent` (who must have started it from its main thread) ends; exits if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which ends the ranks in its own time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
