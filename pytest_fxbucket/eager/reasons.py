"""Why torch's own step rounds otherwise than the captured one, by design; and what torch has no eager step for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.checks.bitwise.judge import RankComparison, first_step
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.plan.factories import dtype_named

if TYPE_CHECKING:
    from pytest_fxbucket.checks.bitwise.job import TensorDifference
    from pytest_fxbucket.eager.unit_calls import UnitCalls
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.selectors import Resolution
    from pytest_fxbucket.step.roles import StepGraph

WORDS = {
    "reused_unit": (
        "a unit of FSDP2's that is called more than once reduces what earlier microbatches gave it by itself there, "
        "here all is added first"
    ),
    "rowwise_bias": "RowwiseParallel adds a bias to a part of the sum, here it is added to the sum",
    "ddp_buckets": (
        "DistributedDataParallel fills buckets of its own by size, and round a ring a sum depends on its place in the bucket"
    ),
    "fused_rnn": "eager runs oneDNN's recurrent layer, here its operators run",
    "gradient_dtype": (
        "FSDP2 from torch 2.15 on has autograd make and add gradients in reduce_dtype, here they are made in param_dtype"
    ),
    "shared_input": (
        "a unit reads a value more than once that is read behind it, too, or is given one more than once: FSDP2 adds the "
        "gradients of the unit's reads first, in the order of its inputs, here autograd adds one after the other"
    ),
}

TRIED_OUT = ("gradient_dtype", "shared_input")
"""Reasons that many models have and few have other bits by: one is named where a run that has it stated is equal."""


def reasons_of(model: nn.Module, plan: Plan, calls: UnitCalls, makes_gradients_to_reduce: bool) -> tuple[str, ...]:
    """The reasons that hold for ``model``, not wrapped, under ``plan``; ``calls`` are those of a forward.

    ``makes_gradients_to_reduce`` is what :mod:`pytest_fxbucket.compat.fsdp` says of this torch.
    """
    parted = forwards_of(model, plan).parted
    biases = any(style == "rowwise" and model.get_submodule(fqn).bias is not None for fqn, style in parted.items())
    rnns = any(isinstance(module, nn.RNNBase) for module in model.modules())
    is_late = plan.step.microbatches > 1 and plan.parallel.mode != "replicate"
    is_ddp = plan.parallel.mode == "replicate"
    rings = plan.run.reduce == "ring" and is_ddp and plan.run_world > 2  # two addends have one sum
    # A stated reason holds with an older torch, too, so that a plan means the same with each torch.
    follows = makes_gradients_to_reduce or "gradient_dtype" in plan.eager.rounds_otherwise
    found = {
        "reused_unit": bool(calls.reused) and is_late,
        "rowwise_bias": biases,
        "ddp_buckets": rings,
        "fused_rnn": rnns,
        "gradient_dtype": follows and _reduces_otherwise(model, plan),
        "shared_input": calls.share_inputs and not is_ddp,
    }
    return tuple(name for name, there in found.items() if there)


def _reduces_otherwise(model: nn.Module, plan: Plan) -> bool:
    computed, reduced = dtype_named(plan.parallel.param_dtype), dtype_named(plan.parallel.reduce_dtype)
    if plan.parallel.mode == "replicate" or reduced is None:
        return False
    return any((computed or one.dtype) != reduced for one in model.parameters())


def gradients_alone(seen: Sequence[RankComparison]) -> bool:
    """Whether the first step that differs has equal losses but other gradients, so that how gradients are made may be why."""
    whats = {one.what for one in _first(seen)}
    return "gradient" in whats and "loss" not in whats


def made_equal(seen: Sequence[RankComparison], stated: Sequence[RankComparison]) -> bool:
    """Whether a gradient that differs in the first differing step of ``seen`` is equal in that step of ``stated``.

    ``stated`` is the same run with one more reason stated. It must not differ in an earlier step.
    """
    step, other = first_step(seen), first_step(stated)
    if step is None or (other is not None and other < step):
        return False
    still = {(one.rank, one.fqn) for one in _first(stated) if one.step == step and one.what == "gradient"}
    return any((one.rank, one.fqn) not in still for one in _first(seen) if one.what == "gradient")


def _first(seen: Sequence[RankComparison]) -> list[TensorDifference]:
    step = first_step(seen)
    return [one for each in seen for one in each.differences if one.step == step]


# Plans for which torch has no eager step, or none that rounds alike. They are found before any rank is asked.


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
    if parallel.mode == "replicate" and parallel.tp > 1:
        return "DistributedDataParallel takes no parameters that are parted over tp"
    if parallel.mode == "replicate" and (parallel.param_dtype or parallel.reduce_dtype):
        return "DistributedDataParallel has no param_dtype and no reduce_dtype"
    if parallel.reduce_order != "scatter_first":
        return f'FSDP2 scatters first, and reduce_order is "{parallel.reduce_order}"'
    if plan.step.clip_norm and (along := next((name for name in ("tp", "ep") if getattr(parallel, name) > 1), "")):
        return f"clip_grad_norm_ takes no parameters of two meshes, as clip_norm with {along} needs"
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
