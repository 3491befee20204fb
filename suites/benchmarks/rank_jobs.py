"""Jobs that the benchmark of the ranks runs."""

from __future__ import annotations

import torch
import torch.distributed as dist


def nothing(rank, world, payload):
    pass


def all_reduce(rank, world, payload):
    dist.all_reduce(torch.ones(3))
