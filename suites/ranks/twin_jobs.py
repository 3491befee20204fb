"""Jobs that fork, or that meddle with the connection of their rank."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import time

from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.messages import Reply


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
