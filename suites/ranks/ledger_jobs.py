"""Jobs that launch collectives, and tell what their ledger says of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from pytest_fxbucket.ranks import flight_recorder


def entered():
    """What this rank's own ledger holds."""
    own = flight_recorder._own
    found = object.__new__(flight_recorder.Ledgers)
    found._map = own.memory
    return [launch.what for launch in found.read(own.start // flight_recorder._LEDGER_BYTES).launches]


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


def ring(rank, world, payload):
    sent = dist.isend(torch.full((3,), float(rank)), (rank + 1) % world)
    got = torch.empty(3)
    dist.recv(got, (rank - 1) % world)
    sent.wait()
    assert got.tolist() == [float((rank - 1) % world)] * 3
    return entered()


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
