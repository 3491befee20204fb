"""Jobs in which one rank goes wrong, and what a failure says of each: for the tests, and for the soak that repeats them.

The payload is the culprit. All jobs begin with a step that goes well, so that marks and numbers of collectives mean something.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_fxbucket.ranks import mark


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` of the failure; `said` in its sentence of the culprit; whether it takes the whole time limit to be noticed.

    `may_be_slow`: whether it cannot be told then from ranks that are slow.
    """

    job: str
    kind: str
    said: str
    is_late: bool = False
    may_be_slow: bool = False


FAULTS = (
    Fault("raise_before", "raised", "raised ValueError: before it"),
    Fault("raise_within", "raised", "raised ValueError: an average of torch.int64"),
    Fault("raise_between_launch_and_wait", "raised", "raised ValueError: before the wait"),
    Fault("raise_after", "raised", "raised ValueError: after it"),
    Fault("exit_at_once", "died", "exited with status 3"),
    Fault("exit_well", "died", "exited with status 0"),
    Fault("kill", "died", "was killed by SIGKILL"),
    Fault("crash", "died", "was killed by SIGSEGV"),
    Fault("stop", "timeout", "is stopped", is_late=True, may_be_slow=True),
    Fault("loop", "timeout", "is still running", is_late=True, may_be_slow=True),
    Fault("hold_the_lock", "timeout", "is still", is_late=True, may_be_slow=True),
    Fault("skip_one", "timeout", "never launched collective 4 of the job on ranks 0-3", is_late=True),
    Fault("swap_two", "timeout", "the ranks part at collective 2 of the job on ranks 0-3", is_late=True),
    Fault("other_size", "mismatch", "the ranks part at collective 2 of the job on ranks 0-3"),
    Fault("leave_out_the_last", "mismatch", "never launched collective 2 of the job on ranks 0-3"),
    Fault("unpicklable", "unpicklable", "its result, of type function, cannot be pickled"),
    Fault("too_much_memory", "raised", "memory"),
    Fault("memory_limit", "raised", "memory"),
    Fault("other_root", "mismatch", "the ranks part at collective 2 of the job on ranks 0-3"),
    Fault("other_source", "mismatch", "the ranks part at collective 2 of the job on ranks 0-3"),
    Fault("leave_a_message", "mismatch", "never received 3 float32 that rank"),
    Fault("read_other_bits", "mismatch", "which receives 3 int32"),
)


def healthy(rank, world, payload):
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones.tolist()


def begin(rank):
    mark("step 0")
    dist.all_reduce(torch.ones(5))
    mark(f"step 1 of {rank}")


def strikes(strike):
    """The job in which the culprit does `strike` where the others launch an all-reduce."""

    def job(rank, world, culprit):
        begin(rank)
        if rank == culprit:
            strike()
        dist.all_reduce(torch.ones(3))

    return job


@strikes
def raise_before():
    raise ValueError("before it")


@strikes
def exit_at_once():
    os._exit(3)


@strikes
def exit_well():
    os._exit(0)


@strikes
def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@strikes
def crash():
    ctypes.string_at(0)


@strikes
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


@strikes
def loop():
    while True:
        pass


@strikes
def hold_the_lock():
    """A call in C that never returns, signals or not, and that holds the interpreter lock."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


@strikes
def memory_limit():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    torch.zeros(256 << 20)


@strikes
def beyond_its_share():
    """What torch says of a rank that wants more than its part of a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB. GPU 0 has a total capacity of 79.11 GiB")


def raise_within(rank, world, culprit):
    begin(rank)
    # An average of integers is refused inside of the call.
    dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.AVG if rank == culprit else dist.ReduceOp.SUM)


def raise_between_launch_and_wait(rank, world, culprit):
    begin(rank)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == culprit:
        raise ValueError("before the wait")
    work.wait()
    dist.barrier()


def raise_after(rank, world, culprit):
    begin(rank)
    dist.all_reduce(torch.ones(3))
    if rank == culprit:
        raise ValueError("after it")


def raise_differently(rank, world, culprits):
    begin(rank)
    dist.barrier()
    if rank == culprits[0]:
        raise KeyError("one cause")
    if rank == culprits[1]:
        raise ZeroDivisionError("another")
    dist.all_reduce(torch.ones(3))


def skip_one(rank, world, culprit):
    begin(rank)
    for turn in range(3):
        if rank != culprit or turn != 1:
            dist.all_reduce(torch.ones(3))


def one_too_many(rank, world, culprit):
    """The culprit launches once more, when all others have returned."""
    begin(rank)
    if rank == culprit:
        dist.all_reduce(torch.ones(3))


def swap_two(rank, world, culprit):
    begin(rank)

    def gather():
        return dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2), async_op=True)

    def scatter():
        return dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * world), async_op=True)

    for launch in [scatter, gather] if rank == culprit else [gather, scatter]:
        launch().wait()


def other_size(rank, world, culprit):
    begin(rank)
    dist.reduce_scatter_tensor(torch.empty(2 + (rank == culprit)), torch.ones((2 + (rank == culprit)) * world))


def other_root(rank, world, culprit):
    begin(rank)
    dist.reduce(torch.ones(3), dst=1 if rank == culprit else 0)


def other_source(rank, world, culprit):
    begin(rank)
    # Not waited for: whether gloo stands still then or goes on depends on who is whose neighbour in its trees.
    dist.broadcast(torch.ones(3), src=(culprit + (1 if rank == culprit else 2)) % world, async_op=True)


def leave_a_message(rank, world, culprit):
    """The one before sends to the culprit, which goes on without it."""
    begin(rank)
    if (rank + 1) % world == culprit:
        dist.isend(torch.ones(3), culprit)
    dist.all_reduce(torch.ones(3))


def read_other_bits(rank, world, culprit):
    begin(rank)
    if (rank + 1) % world == culprit:
        dist.send(torch.ones(3), culprit)
    if rank == culprit:
        dist.recv(torch.ones(3, dtype=torch.int32), (rank - 1) % world)
    dist.all_reduce(torch.ones(3))


def wait_for_a_message(rank, world, culprit):
    """The one before waits for the culprit, which sends nothing."""
    begin(rank)
    if (rank + 1) % world == culprit:
        dist.recv(torch.ones(3), culprit)


def leave_out_the_last(rank, world, culprit):
    begin(rank)
    if rank != culprit:
        dist.all_reduce(torch.ones(3), async_op=True)


def unpicklable(rank, world, culprit):
    begin(rank)
    return (lambda: None) if rank == culprit else rank


def too_much_memory(rank, world, culprit):
    begin(rank)
    dist.all_reduce(torch.ones(1 << 48 if rank == culprit else 3))


def raise_on_all(rank, world, payload):
    raise ValueError(f"{rank} of {world}")


def announce_and_hang(rank, world, fifo):
    with open(fifo, "wb", buffering=0) as file:
        file.write(b"x")
    dist.barrier()
    signal.pause()


def opened(rank, world, payload):
    """Everything that this process has open or mapped, by name."""
    begin(rank)
    names = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps") as maps:
        return names | {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) > 5}


def listening(rank, world, payload):
    """Local addresses, as the kernel writes them, on which this process listens."""
    links = [name for name in opened(rank, world, payload) if name.startswith("socket:")]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (words[3] == "0A" or table.startswith("udp")):
                found.append(words[1].partition(":")[0])
    return found
