"""NCCL's ring played message by message, and what the ranks make of the same addends."""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist

from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.sums import RingOrder

C10D = torch.ops._c10d_functional


def addends(rank: int, world: int, dtype: torch.dtype, rows: int = 1) -> torch.Tensor:
    """Some 1,000 numbers of many sizes for each of ``rows``."""
    generator = torch.Generator().manual_seed(100 * world + rank)
    numbers = torch.randn(rows * 1021, generator=generator, dtype=torch.float64)
    return (numbers * torch.exp2(torch.randint(-6, 6, numbers.shape, generator=generator))).to(dtype)


def spans(count: int, itemsize: int, channels: int) -> list[tuple[int, int]]:
    """Elements of each channel: cells of 16 bytes, as many for each, the last has what is left."""
    cells = ceil(count * itemsize / 16)
    per_channel = ceil(cells / channels) * 16 // itemsize
    return [(begin, min(begin + per_channel, count)) for begin in range(0, count, per_channel)]


def played_scatter(sent: list[torch.Tensor], ring: RingOrder, ranks: list[int]) -> list[torch.Tensor]:
    """What each rank has of a reduce-scatter in the end: each step hands a partial sum to the next in the ring."""
    world, count = len(sent), sent[0].numel() // len(sent)
    results = [torch.zeros(count, dtype=sent[0].dtype) for _ in sent]
    for channel, (begin, end) in enumerate(spans(count, sent[0].itemsize, ring.channels)):
        order = ring.order(channel, ranks)
        own = [tensor.view(world, count)[:, begin:end] for tensor in sent]
        inbox: dict[int, torch.Tensor] = {}
        for step in range(world):
            outbox = {}
            for place, rank in enumerate(order):
                dest = order[(place - 1 - step) % world]
                mine = own[rank][dest]
                value = mine if step == 0 else inbox[rank] + mine
                if step == world - 1:
                    results[rank][begin:end] = value
                outbox[order[(place + 1) % world]] = value
            inbox = outbox
    return results


def played_all_reduce(
    sent: list[torch.Tensor], ring: RingOrder, ranks: list[int], share: torch.Tensor | None = None
) -> torch.Tensor:
    """The same of an all-reduce: rounds of a chunk for each rank, the last round with chunks just large enough.

    ``share``: what each rank multiplies its own by, in one with adding it.
    """
    world, itemsize = len(sent), sent[0].itemsize
    result = torch.zeros_like(sent[0])
    for channel, (begin, end) in enumerate(spans(sent[0].numel(), itemsize, ring.channels)):
        order = ring.order(channel, ranks)
        chunk, at = ring.chunk_bytes // 16 * 16 // itemsize, begin
        while at < end:
            if end - at < world * chunk:
                chunk = ceil(ceil((end - at) / world) / (16 // itemsize)) * (16 // itemsize)
            inbox: dict[int, torch.Tensor] = {}
            for step in range(world):
                outbox = {}
                for place, rank in enumerate(order):
                    piece = (place - 1 - step) % world
                    low = min(at + piece * chunk, end)
                    high = min(low + chunk, end)
                    mine = sent[rank][low:high]
                    if share is None:
                        value = mine if step == 0 else inbox[rank] + mine
                    else:
                        value = mine * share if step == 0 else sums.multiplied_and_added(mine, share, inbox[rank])
                    if step == world - 1:
                        result[low:high] = value
                    outbox[order[(place + 1) % world]] = value
                inbox = outbox
            at += world * chunk
    return result


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def as_played(rank: int, world: int, payload: tuple[torch.dtype, int, int, int]) -> dict[str, bool]:
    """Whether the ranks' reductions have the bits of the play, and whether that differs from rank order."""
    dtype, channels, chunk_bytes, nodes = payload
    ring = RingOrder(channels, chunk_bytes, world // nodes)
    ranks = list(range(world))
    scattered = [addends(one, world, dtype, world) for one in ranks]
    reduced = [addends(one, world, dtype) for one in ranks]
    in_order = C10D.wait_tensor(C10D.all_reduce(reduced[rank], "sum", "0"))
    sums.add_by(ring)
    share = torch.tensor(1 / world, dtype=dtype)
    one = C10D.wait_tensor(C10D.reduce_scatter_tensor(scattered[rank], "sum", world, "0"))
    all_of_it = C10D.wait_tensor(C10D.all_reduce(reduced[rank], "sum", "0"))
    average = C10D.wait_tensor(C10D.all_reduce(reduced[rank], "avg", "0"))
    to_last = reduced[rank].clone()
    dist.reduce(to_last, world - 1)
    rooted = played_scatter([torch.cat([part] * world) for part in reduced], ring, ranks)[world - 1]
    played = played_all_reduce(reduced, ring, ranks)
    return {
        "reduce_scatter": equal(one, played_scatter(scattered, ring, ranks)[rank]),
        "all_reduce": equal(all_of_it, played),
        "average": equal(average, played_all_reduce(reduced, ring, ranks, share)),
        "reduce": equal(to_last, rooted if rank == world - 1 else reduced[rank]),
        "other than in rank order": not equal(all_of_it, in_order),
    }


def next_job(rank: int, world: int, payload: None) -> bool:
    """Whether a job that asks for nothing adds in rank order."""
    parts = [addends(one, world, torch.float32) for one in range(world)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return equal(C10D.wait_tensor(C10D.all_reduce(parts[rank], "sum", "0")), total)
