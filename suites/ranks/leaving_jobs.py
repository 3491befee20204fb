"""Jobs that end well, and leave something of their process changed."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import resource
import signal
import sys
import threading

import torch.distributed as dist


def take_away(rank, world, what):
    """What other jobs need."""
    match what:
        case "group":
            dist.destroy_process_group()
        case "another group":
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        case "output":
            os.close(1)
            os.close(2)
        case "input":
            os.close(0)
        case "standard":
            os.closerange(0, 3)
        case "reopened":
            os.close(0)
            os.pipe()
        case "stdout":
            sys.stdout.close()
        case "detached":
            sys.stdout.detach()
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        case "limit":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
    return "well"


def leave(rank, world, payload):
    """Nothing but what can be put back."""
    print("before")
    sys.stdout = sys.stderr = io.StringIO()
    sys.excepthook = sys.unraisablehook = threading.excepthook = print
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    signal.setitimer(signal.ITIMER_PROF, 1000)
    os.umask(0)
    sys.setrecursionlimit(77777)
    gc.disable()
    gc.set_threshold(1, 1, 1)
    sys.setprofile(lambda *_: None)
    sys.settrace(lambda *_: None)
    faulthandler.dump_traceback_later(1000, file=sys.__stderr__)
    return "well"


def alarm(rank, world, payload):
    """An alarm that would end the process, soon after the job."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return "well"


def wait_for_alarm(rank, world, payload):
    """Whether an alarm comes within the time that was left to it."""
    return signal.sigtimedwait({signal.SIGALRM}, 0.5) is None


def found(rank, world, payload):
    """What `leave` might have left."""
    print("after")
    umask = os.umask(0)
    os.umask(umask)
    return {
        "stdout": sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__,
        "hooks": sys.excepthook is sys.__excepthook__ and sys.unraisablehook is sys.__unraisablehook__,
        "thread hook": threading.excepthook is threading.__excepthook__,
        "handlers": [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1)],
        "timers": [signal.getitimer(one)[0] for one in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "umask": umask,
        "recursion": sys.getrecursionlimit(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "traced": (sys.gettrace(), sys.getprofile()),
    }


def stand_still(rank, world, payload):
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def leave_from_a_thread(rank, world, payload):
    """As leave, without what only a process's main thread may do."""
    sys.stdout = sys.stderr = io.StringIO()
    sys.excepthook = sys.unraisablehook = threading.excepthook = print
    signal.setitimer(signal.ITIMER_REAL, 1000)
    os.umask(0)
    sys.setrecursionlimit(77777)
    gc.disable()
    return "well"
