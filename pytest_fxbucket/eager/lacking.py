"""What a plan asks for that torch has no eager step for, or none that rounds alike; said before any rank is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promise import dtype_name

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import StepGraph
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.selector import Resolution

_MODES = ("fully_shard", "replicate", "hybrid_shard")


def lacking(plan: Plan, step: StepGraph, resolution: Resolution, rounding: Sequence[str]) -> str | None:
    """Why there is no eager step to hold ``step`` against, as a clause; None if there is one.

    ``resolution`` is what the plan's entries mean, ``rounding`` are transformations that round otherwise than the model.
    """
    if plan.model is None:
        return "a [graph] comes without the model that it was traced from"
    if plan.eager.factory:
        return None
    if rounding:
        return f"the transformation {rounding[0]} rounds otherwise than the model's own step"
    if one := next((one for one in plan.override if one.by != "call"), None):
        return f"[[override]] {one.by} gives the graph something else than the model's own modules compute"
    shards = plan.parallel.mode != "replicate"
    return _lacking_mode(plan) or (_lacking_parameters(step, resolution) if shards else None)


def _lacking_mode(plan: Plan) -> str | None:
    """What torch's data and tensor parallelism does not do."""
    parallel = plan.parallel
    if parallel.mode not in _MODES:
        return f"torch has no eager step for mode {parallel.mode}"
    if parallel.ep > 1:
        return "torch has no eager step for experts that are parted over ep"
    if parallel.mode == "replicate" and parallel.tp > 1:
        return "DistributedDataParallel takes no parameters that are parted over tp"
    if parallel.mode == "replicate" and (parallel.param_dtype or parallel.reduce_dtype):
        return "DistributedDataParallel has no param_dtype and no reduce_dtype"
    if parallel.reduce_order != "scatter_first":
        return f'FSDP2 scatters first, and reduce_order is "{parallel.reduce_order}"'
    if plan.step.clip_norm and parallel.tp > 1:
        return "clip_grad_norm_ takes no parameters of two meshes, as clip_norm with tp needs"
    return None


def _lacking_parameters(step: StepGraph, resolution: Resolution) -> str | None:
    """What FSDP2 does not shard."""
    if scalar := next((one.fqn for one in step.parameters if not one.shape), None):
        return f"FSDP2 takes no parameter without dimensions, as {scalar} is"
    dtype_of = {one.fqn: dtype_name(one.dtype) for one in step.parameters}
    units = [(f"entry {one.name}", one.parameters) for one in resolution.entries]
    for unit, parameters in [*units, ("what no entry has", resolution.unplanned)]:
        if len(dtypes := dict.fromkeys(dtype_of[fqn] for fqn in parameters)) > 1:
            return f"FSDP2 takes parameters of one dtype a unit, and {unit} has {' and '.join(sorted(dtypes))}"
    return None
