"""Jobs that the rank tests run on real ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pytest_fxbucket.ranks import mark


def echo(rank, world, payload):
    return payload


def place(rank, world, payload):
    return rank, world, dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name, os.getpid()


def threads(rank, world, payload):
    return torch.get_num_threads()


def surroundings(rank, world, payload):
    return os.getcwd(), dict(os.environ), list(sys.path)


def spoil(rank, world, payload):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(7)
    torch.set_deterministic_debug_mode("error")
    torch.rand(100)
    random.random()
    os.environ["FXBUCKET_SPOILED"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/spoiled")


def inspect_state(rank, world, payload):
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rand": torch.rand(4).tolist(),
        "random": random.random(),
        "spoiled": os.environ.get("FXBUCKET_SPOILED"),
        "cwd": os.getcwd(),
        "path": sys.path[0],
    }


def value_of(rank, world, module):
    return importlib.import_module(module).VALUE


def shout(rank, world, payload):
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    os.write(1, b"raw\n")


def flood(rank, world, lines):
    for line in range(lines):
        print(f"line {line} " + "x" * 90)
    raise ValueError("flooded")


def raise_on(rank, world, culprit):
    mark(f"step {rank}")
    if rank == culprit:
        raise ValueError(f"no good on rank {rank}")
    dist.all_reduce(torch.ones(3))
    return "done"


def die_on(rank, world, payload):
    culprit, how = payload
    mark("before the all-reduce")
    if rank == culprit and how == "exit":
        os._exit(3)
    if rank == culprit:
        os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(3))


def raise_here_and_there(rank, world, payload):
    if rank % 2:
        raise ValueError("odd")
    raise KeyError("even")


def raise_after_peer_left(rank, world, culprit):
    if rank == culprit:
        dist.group.WORLD._gloo = None
        raise ValueError("the cause")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


def late_cause(rank, world, culprit):
    if rank != culprit:
        raise RuntimeError("Connection closed by peer")
    time.sleep(0.05)
    raise KeyError("the cause")


def stop_on(rank, world, culprit):
    mark(f"mark of {rank}")
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(3))


def loop_on(rank, world, culprit):
    while rank == culprit:
        pass
    dist.all_reduce(torch.ones(3))


def never_joins(rank, world, culprit):
    if rank != culprit:
        dist.all_reduce(torch.ones(3))


def sigint_is_ignored(rank, world, payload):
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


def unpicklable(rank, world, culprit):
    return (lambda: None) if rank == culprit else 1


def leave(rank, world, culprit):
    if rank == culprit:
        sys.exit(5)
    return 1


def only_some_reduce(rank, world, payload):
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


def sum_of_ones(rank, world, payload):
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return ones.tolist()


def parent_of(rank, world, payload):
    return os.getppid()


def announce_and_loop(rank, world, fifo):
    with open(fifo, "wb", buffering=0) as file:
        file.write(b"x")
    while True:
        pass


def sockets(rank, world, payload):
    """The sockets that this rank holds, by the kernel's name."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}


def mark_at_length(rank, world, text):
    mark("short")
    mark(text)
    raise ValueError("marked")


def sized(rank, world, megabytes):
    return torch.full((megabytes << 18,), float(rank))


def make_groups(rank, world, payload):
    """A 2 x 2 mesh and a group more: six process groups in all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(3), group=mesh.get_group("a"))
    dist.all_reduce(torch.ones(3), group=dist.new_group([0, 1, 2, 3]))


def holdings(rank, world, payload):
    """How many descriptors and threads this rank has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def summed_by_dtensor(rank: int, world: int, groups_before: int) -> float:
    """A sum over the second dimension of a mesh that is made after ``groups_before`` other groups."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("first", "second"))["second"]
    parts = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Partial()])
    return float((parts * 2.0).redistribute(placements=[Replicate()]).to_local()[0])
