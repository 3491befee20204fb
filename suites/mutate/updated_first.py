"""The MLP that its user traced, which first lets its weights decay, in place, and then gathers them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.models import traced
from pytest_fxbucket.capture.given_graphs import TracedStep

PLAN = """
[graph]
factory = "suites.mutate.updated_first:step"

[parallel]
dp_shard = 2

[bucket]
plan = ["layers.[0-2]"]
"""


class _Decayed(traced._Step):
    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        for weight in inputs[0:-2:2]:
            weight.mul_(0.5)
        return super().__call__(*inputs)


def step() -> TracedStep:
    """As ``fixtures.models.traced``, of this rank."""
    given = traced.step()
    inputs = given.inputs["joint"]
    with traceback.preserve_node_meta():
        module = make_fx(_Decayed(dist.get_world_size()), tracing_mode="fake")(*inputs)
    for node in module.graph.nodes:
        traced._name_as_torch_does(node)
    return TracedStep(graphs={"joint": module}, inputs=given.inputs, roles=given.roles, fqns=given.fqns)
