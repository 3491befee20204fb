"""The job of ``bitwise``, in ranks that read each sent graph wrongly: an add becomes a difference in both runs alike."""

from __future__ import annotations

from unittest import mock

import torch
from torch import fx

from pytest_fxbucket.checks.bitwise import job
from pytest_fxbucket.step.portable import PortableGraph, decode

aten = torch.ops.aten


def run(rank: int, world: int, task: job.BitwiseTask) -> job.BitwiseOutcome:
    with mock.patch.object(job._DECODED, "take", lambda sent, keep: {name: _wrongly(one) for name, one in sent.items()}):
        return job.run(rank, world, task)


def _wrongly(portable: PortableGraph) -> fx.GraphModule:
    gm = decode(portable)
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        node.target = aten.sub.Tensor
    gm.recompile()
    return gm
