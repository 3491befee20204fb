"""What a rank is given to do a thousand times, and what it is killed in."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pytest_fxbucket.ranks import mark


def nothing(rank, world, payload):
    return None


def reduce(rank, world, payload):
    mark("a few collectives")
    for size in (3, 1000, 100_000):
        dist.all_reduce(torch.ones(size))
    dist.barrier()
    return rank


def bounce(rank, world, tensor):
    return tensor + rank


def print_much(rank, world, payload):
    for line in range(200):
        print(f"line {line} of rank {rank} " + "x" * 60)


def make_groups(rank, world, payload):
    mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    total = torch.ones(2)
    dist.all_reduce(total, group=mesh["b"].get_group())
    return total.tolist()


def train(rank, world, payload):
    model = torch.nn.Linear(64, 64)
    model(torch.randn(8, 64)).sum().backward()
    dist.all_reduce(model.weight.grad)
    return model.weight.grad


def work_on(rank, world, payload):
    """Collectives without end, for who is to be killed in the middle of one."""
    while True:
        for launch in range(100):
            mark(f"turn {launch}")
            dist.all_reduce(torch.ones(1000))
            dist.all_gather_into_tensor(torch.empty(100 * world), torch.ones(100))
