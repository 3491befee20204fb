"""Jobs of ``make gpu`` that need a GPU; nothing else of it does."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.bench.job import TimedStep, TimingTask
from pytest_fxbucket.bench.timeline.marks import BUCKETED
from pytest_fxbucket.ranks import device, mark
from suites.gpu.step_jobs import total

WARM_UP = 3
"""Steps on a stream beside, before a graph is captured: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""


def graphed_all_reduce(rank: int, world: int, payload: None) -> list[str]:
    """Whether a replayed all-reduce gives what it gave when it was launched: names of what differs."""
    ones = torch.ones(4, device=device())
    return _replayed(lambda: [_all_reduced(ones)])


def graphed(rank: int, world: int, payload: tuple[TimingTask, None]) -> list[str]:
    """The same of the results of the bucketed step."""
    task, _ = payload
    step = TimedStep(BUCKETED, rank, task.phases)
    step.prepare()

    def results() -> list[torch.Tensor]:
        step.call()
        return [tensor for one in step.results for tensor in (one if isinstance(one, list | tuple) else [one])]

    return _replayed(results)


def _replayed(call: Any) -> list[str]:
    mark("beside a stream of its own")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            expected = [tensor.clone() for tensor in call()]
    torch.cuda.current_stream().wait_stream(beside)
    mark("capturing")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    mark("replaying")
    graph.replay()
    torch.cuda.synchronize()
    return [f"output {n}" for n, (a, b) in enumerate(zip(expected, results, strict=True)) if not torch.equal(a, b)]


def _all_reduced(ones: torch.Tensor) -> torch.Tensor:
    result = ones.clone()
    dist.all_reduce(result)
    return result


class _TooFar:
    """Memory of a tensor, and as much behind it as nobody has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (1 << 40,),
            "typestr": "|u1",
            "version": 3,
        }


def illegal_access(rank: int, world: int, culprit: int) -> None:
    """One rank writes where it has no memory, which ends its CUDA context."""
    total(rank, world, None)
    if rank == culprit:
        torch.as_tensor(_TooFar(torch.zeros(16, device=device())), device=device()).fill_(1)
        torch.cuda.synchronize()
    total(rank, world, None)
    torch.cuda.synchronize()


def out_of_memory(rank: int, world: int, culprit: int) -> None:
    """One rank asks for more than there is."""
    if rank == culprit:
        torch.empty(1 << 50, dtype=torch.uint8, device=device())
    total(rank, world, None)
    torch.cuda.synchronize()


def beyond_its_share(rank: int, world: int, culprit: int) -> None:
    """One rank asks for all of its part of the GPU, of which its tensors may have nine tenths; alone, for the whole GPU."""
    if rank == culprit:
        _, whole = torch.cuda.mem_get_info()
        percent = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))  # by how many it is shared, service or not
        torch.empty(whole * percent // 100, dtype=torch.uint8, device=device())
    total(rank, world, None)
    torch.cuda.synchronize()
