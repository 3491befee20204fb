"""Jobs that print much, raise oddly, fork, meddle with their rank's connection, or leave their process changed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import itertools
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time

import torch.distributed as dist

from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.messages import Reply

# They print, or say, more than anybody reads, or raise what can hardly be told.


def print_for_ever(rank, world, payload):
    for number in itertools.count(1):
        print(f"line {number} " + "x" * 10_000)


def print_much(rank, world, mebibytes):
    for number in range(mebibytes):
        begin, end = f"mebibyte {number} ", f" mebibyte {number}\n"
        sys.stdout.write(begin + "x" * ((1 << 20) - len(begin) - len(end)) + end)


def print_lines(rank, world, lines):
    for number in range(lines):
        print(f"line {number} " + "x" * 90)


def raise_at_length(rank, world, characters):
    raise ValueError("x" * characters)


class Odd(Exception):
    def __str__(self):
        if self.args[0] == "no text":
            return 3
        return str(self) if self.args[0] == "both raise" else 1 / 0

    def __repr__(self):
        raise ValueError("no repr either")


class Unsendable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.kept = (lambda: None, b)

    def __reduce__(self):
        raise RuntimeError("y" * 1_000_000)


def raise_oddly(rank, world, how):
    match how:
        case "sys.exit":
            sys.exit()
        case "sys.exit(0)":
            sys.exit(0)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "cannot be pickled":
            raise Unsendable(3, 4)
        case "group":
            raise ExceptionGroup("several", [Odd("a"), ValueError("b")])
    raise Odd(how)


def return_oddly(rank, world, payload):
    return Unsendable(1, 2)


class SlowToRead:
    """Takes longer to be unpickled than its job may take."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return read_slowly, (self.seconds,)


def read_slowly(seconds):
    time.sleep(seconds)
    return "read"


def slow_to_read(rank, world, seconds):
    return SlowToRead(seconds)


# They fork, or meddle with the connection of their rank.


def fork_and(rank, world, how):
    """Both processes go on from here as one job; the first waits for the other, as long as that has an end."""
    child = forked_in_c() if how == "return, forked in C" else os.fork()
    if child == 0:
        if how == "raise":
            raise ValueError("on the twin alone")
        if how == "exit":
            sys.exit(7)
        if how == "stay":
            while True:
                signal.pause()
        return "of the twin"
    if how == "stay":
        return child
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_in_c():
    """As os.fork, but Python hears nothing of it.

    Where another thread has asked for the interpreter's lock, the child would hand it over, and wait for that thread, which it
    does not have: no thread asks while this runs.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        time.sleep(0.05)  # who has asked already gets it
        return ctypes.PyDLL(None).fork()
    finally:
        sys.setswitchinterval(before)


def child_of_a_child(rank, world, payload):
    """What a grandchild says, whose own parent has ended."""
    source, target = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            while os.getppid() == child:
                time.sleep(0.001)
            os.write(target, b"well")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(target)
    return os.read(source, 10)


def connections():
    """This rank's ends of sockets that have no name: its connection with pytest."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.family == socket.AF_UNIX:
                    yield found
        except OSError:
            pass


def forge(rank, world, payload):
    """Answer before its turn, as another process would."""
    buffers = [*wire.pack(Reply(RankState(rank, "returned"), *payload)), *wire.pack("forged")]
    for connection in connections():
        connection.sendall(b"".join([wire.head(buffers), *buffers]))
    return "honest"


def garble(rank, world, payload):
    culprit, data = payload
    for connection in connections() if rank == culprit else ():
        connection.sendall(data)
    return "honest"


# They end well, and leave something of their process changed.


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
