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
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from pytest_fxbucket.compat.c10d import group_called, make_group, make_twin
from pytest_fxbucket.ranks import device, flight_recorder, mark


def echo(rank, world, payload):
    return payload


def place(rank, world, payload):
    return rank, world, dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name, os.getpid()


def is_loaded(rank, world, name):
    return name in sys.modules


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


def raise_on(rank, world, culprit):
    mark(f"step {rank}")
    print(f"printed by {rank}")
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


def sigint_is_ignored(rank, world, payload):
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


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


GATHER = torch.ops._c10d_functional


def gathers_in_flight(rank, world, count):
    """Of `count` all-gathers that are in flight together what came, and the operators that were called."""
    name = dist.group.WORLD.group_name
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        flying = [
            GATHER.all_gather_into_tensor(torch.full((3,), float(10 * rank + number)), world, name) for number in range(count)
        ]
        arrived = [GATHER.wait_tensor(one).tolist() for one in flying]
    return arrived, sorted({event.name for event in seen.events() if event.name.startswith("c10d::")})


def gather_of_several(rank, world, payload):
    name = dist.group.WORLD.group_name
    GATHER.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(3)], world, name)


def on_gpu(rank: int, world: int, payload: None) -> tuple[str, str, str, int]:
    """Device, GPU, the workspace of cuBLAS, and how deterministic torch is."""
    return (
        device(),
        os.environ["CUDA_VISIBLE_DEVICES"],
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
        torch.get_deterministic_debug_mode(),
    )


# They launch collectives, and tell what their flight record says of them.


def entered():
    """What this rank's own flight record holds."""
    return [launch.what for launch in flight_recorder._position(flight_recorder._own).launches]


def every_kind(rank, world, payload):
    dist.all_reduce(torch.ones(3))
    dist.reduce(torch.ones(2, dtype=torch.float64), 1, op=dist.ReduceOp.MAX)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8), op=dist.ReduceOp.AVG)
    functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, dist.group.WORLD).wait()
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(2))
    functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).wait()
    dist.all_gather([torch.empty(2) for _ in range(4)], torch.ones(2))
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    dist.broadcast(torch.ones(5, dtype=torch.int64), 0)
    dist.barrier()
    return entered()


def on_a_twin(rank, world, payload):
    make_group("pair", [0, 1])
    make_twin("pair")
    for name in ("pair", "pair:gather", "pair:gather"):
        dist.all_reduce(torch.ones(2), group=group_called(name))
    where = flight_recorder._position(flight_recorder._own)
    return [(where.groups[launch.group].name, launch.number) for launch in where.launches]


def ring(rank, world, payload):
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    got = torch.empty(3)
    dist.recv(got, (rank - 1) % world)
    sent.wait()
    assert got.tolist() == [float((rank - 1) % world)] * 3
    return entered()


def each_to_the_first(rank, world, payload):
    """All others send to rank 0, which takes what comes first; it says from whom it had something."""
    if rank:
        return dist.send(torch.full((3,), float(rank)), 0)
    got = torch.empty(3)
    senders = {dist.recv(got): got[0].item() for _ in range(1, world)}
    assert all(sender == value for sender, value in senders.items())
    return sorted(senders)


def other_kind(rank, world, culprit):
    dist.barrier()
    if rank == culprit:
        return dist.all_gather_into_tensor(torch.empty(8), torch.ones(2), async_op=True) and None
    return dist.all_reduce(torch.ones(2), async_op=True) and None


def other_order_on_two_groups(rank, world, culprit):
    """Two groups of all ranks; the culprit launches on them the other way round."""
    first, second = dist.new_group(), dist.new_group()
    groups = [second, first] if rank == culprit else [first, second]
    for group in groups:
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    dist.all_reduce(torch.ones(2), group=first)


def on_half_the_ranks(rank, world, payload):
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    for _ in range(1 + rank // 2):
        dist.all_reduce(torch.ones(2), group=low if rank < 2 else high)
    return entered()
