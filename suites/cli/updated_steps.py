"""Whole steps for ``fxbucket explain``, as a ``[graph]`` factory gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.traced import TracedStep
from suites.graph.whole_steps import WholeStep, passed


def by_entry() -> TracedStep:
    return _traced(WholeStep(kind="fused"))


def clipped() -> TracedStep:
    return _traced(WholeStep(kind="fused", clips=True))


def early(gm: fx.GraphModule, module_bucket_plans: Any) -> fx.GraphModule:
    """A pass of somebody else, which does what ours does."""
    return fx.GraphModule(torch.nn.Module(), passed(WholeStep(kind="fused")).graph)


def _traced(step: WholeStep) -> TracedStep:
    gm = fx.GraphModule(torch.nn.Module(), step.finish())
    ends = {"inputs": step.inputs, "outputs": step.outputs}
    return TracedStep(
        graphs={"joint": gm},
        inputs={"joint": tuple(torch.ones(value.shape, dtype=value.dtype) for value in step.inputs)},
        roles={"joint": {side: [value.role for value in values] for side, values in ends.items()}},
        fqns={"joint": {side: [value.fqn for value in values] for side, values in ends.items()}},
    )
