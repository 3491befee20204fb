"""What ranks over plain gloo are given to do."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
