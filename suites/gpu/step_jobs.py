"""Jobs of ``make gpu`` that run on any device: each rank's side."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.bench.job import TimedStep, TimingTask, seconds_of
from pytest_fxbucket.bench.timeline.marks import BUCKETED
from pytest_fxbucket.checks.bitwise.localise import bits_digest
from pytest_fxbucket.process import collector
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.ranks.process_groups.sums import ReduceOperation, RingOrder
from suites.ranks.ring_jobs import addends

SUM = ReduceOperation("SUM")
NCCL_CHUNK_BYTES = 2 << 20
"""Of an all-reduce under protocol Simple on a ring: 4 MiB of buffer in 8 steps, of which a chunk takes half."""


def repeated(rank: int, world: int, payload: tuple[TimingTask, int]) -> list[str]:
    """A digest of what each of some steps made of the same state."""
    task, times = payload
    with collector.paused():
        found = []
        for number in range(times):
            mark(f"repeat {number + 1} of {times}")
            step = TimedStep(BUCKETED, rank, task.phases)
            step.run()
            found.append(bits_digest([tensor for state in step.states for tensor in state]))
    return found


def timed(rank: int, world: int, payload: tuple[TimingTask, int]) -> dict[str, dict[str, Any]]:
    """Of each variant the least seconds of some steps, and how many launches a timeline shows in flight."""
    task, times = payload
    steps = {name: TimedStep(name, rank, task.phases) for name in task.variants}
    seconds = {}
    for name, step in steps.items():
        taken = []
        for _ in range(times):
            step.prepare()
            dist.barrier()
            taken.append(seconds_of(step.call, device()))
            step.settle()
        seconds[name] = min(taken)
    flights = {
        name: sum(span.kind == "flight" for spans in step.traced(1)[0] for span in spans) for name, step in steps.items()
    }
    return {"seconds": seconds, "flights": flights}


def total(rank: int, world: int, payload: None) -> float:
    """What all ranks' ones come to."""
    ones = torch.ones(3, device=device())
    dist.all_reduce(ones)
    return float(ones[0])


def kill(rank: int, world: int, culprit: int) -> None:
    """One rank is killed, the others are in a collective."""
    total(rank, world, None)
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    total(rank, world, None)


def hang(rank: int, world: int, culprit: int) -> None:
    """One rank never launches what the others wait for."""
    total(rank, world, None)
    if rank != culprit:
        total(rank, world, None)
    else:
        signal.pause()


def raises(rank: int, world: int, culprit: int) -> None:
    """One rank raises, the others are in a collective."""
    if rank == culprit:
        raise ValueError("before the collective")
    total(rank, world, None)


def summed(rank: int, world: int, dtype_name: str) -> dict[str, int]:
    """Of a reduce-scatter, an all-reduce and an average how many elements are not what the ring gives.

    Ranks run with the ring for all but all-reduces. NCCL reads its algorithm for each group, so the one here goes round it.
    """
    dtype = getattr(torch, dtype_name)
    sent = [addends(other, world, dtype, rows=16 * world) for other in range(world)]
    ring = RingOrder(1, NCCL_CHUNK_BYTES, world)
    ranks = list(range(world))
    own = sent[rank].to(device())
    reduced, average = own.clone(), own * 2.0**-130
    denormals = [one * 2.0**-130 for one in sent]
    with algorithm("Ring"):
        group = dist.new_group()
        dist.all_reduce(reduced, group=group)
        dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    part = own.new_empty(own.numel() // world)
    dist.reduce_scatter_tensor(part, own)
    pieces = [one.view(world, -1)[rank] for one in sent]
    expected = {
        "all_reduce": (reduced, ring(sent, SUM, ranks, None)),
        "average": (average, ring(denormals, ReduceOperation("AVG"), ranks, None)),
        "reduce_scatter": (part, ring(pieces, SUM, ranks, rank)),
    }
    return {kind: differing(got.cpu(), want) for kind, (got, want) in expected.items()}


def moved(rank: int, world: int, dtype_name: str) -> dict[str, int]:
    """Of an average, with denormals, how many elements have other bits where they lie elsewhere in a longer message."""
    addend = torch.cat([addends(rank, world, torch.float64) * size for size in (1.0, 2.0**-130)])
    own = addend.to(getattr(torch, dtype_name)).to(device())
    longer = torch.cat([own.new_ones(777), own, own.new_ones(4 * NCCL_CHUNK_BYTES)])
    for message in (own, longer):
        dist.all_reduce(message, op=dist.ReduceOp.AVG)
    return {"average": differing(longer[777 : 777 + own.numel()].cpu(), own.cpu())}


@contextmanager
def algorithm(name: str) -> Iterator[None]:
    """NCCL's choice for the groups that connect meanwhile."""
    before = os.environ.get("NCCL_ALGO")
    os.environ["NCCL_ALGO"] = name
    try:
        yield
    finally:
        os.environ.pop("NCCL_ALGO")
        if before is not None:
            os.environ["NCCL_ALGO"] = before


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements have other bits: another zero is another result, the same NaN is the same."""
    bits = [tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1) for tensor in (got, want)]
    return int((bits[0] != bits[1]).any(-1).sum())


def compiled(rank: int, world: int, payload: tuple[str, bool]) -> list[str]:
    """Names of what differs between training under inductor with the pass and without; with triton where there is a GPU.

    Another name is there where inductor was not what trained, or wrote code or none against what was asked.
    """
    from torch._inductor import metrics as made

    from suites.compiled import rank_jobs_of_compiled

    case, with_code = payload
    warnings.simplefilter("ignore")
    if with_code:
        rank_jobs_of_compiled.WITHOUT_CODE = {"compile_threads": 1}
    before = made.ir_nodes_pre_fusion, made.generated_kernel_count
    with torch.compiler.config.patch(force_disable_caches=True):  # a graph of a cache is not compiled
        found = rank_jobs_of_compiled.differing(rank, world, {"cases": [case], "inductor": True})[case]
    nodes, kernels = made.ir_nodes_pre_fusion - before[0], made.generated_kernel_count - before[1]
    if not nodes:
        found.append("inductor compiled nothing")
    if (kernels > 0) != with_code:
        found.append(f"inductor wrote {kernels} kernels")
    return found
