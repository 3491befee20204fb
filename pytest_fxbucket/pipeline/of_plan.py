"""The stages of a plan, without running any ranks: its model is cut where ``[pipeline]`` says, or at proposed cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.batch import first_batch, microbatches, split_of
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.model import build
from pytest_fxbucket.capture.names import units_of
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.modules import each_tensor
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.pipeline.cut import naming_plan
from pytest_fxbucket.pipeline.played import bubble, bubble_by_the_book
from pytest_fxbucket.pipeline.propose import cuts_of_forward, seconds_of_parts
from pytest_fxbucket.pipeline.schedules import table_of
from pytest_fxbucket.pipeline.split import split_forward
from pytest_fxbucket.pipeline.stages import Summary
from pytest_fxbucket.pipeline.trace import Forward, trace_forward
from pytest_fxbucket.plan.factories import dtype_named
from pytest_fxbucket.plan.pipeline_schedules import rank_of_stage
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Pipeline
from pytest_fxbucket.step.mesh import mesh_with
from pytest_fxbucket.step.pipelined import Crossing


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a plan, as one microbatch goes through it."""

    summary: Summary
    rank: int
    """Place along ``pp`` of the rank that has the stage."""
    parameters: int
    """Elements of its parameters before they are sharded; a tied parameter counts in each stage that reads it."""
    parameter_bytes: int
    """Bytes of its parameters in the dtype in which they are stored."""


@dataclass(frozen=True, slots=True)
class PlannedStages:
    """All stages of a plan, what crosses the cuts, and how much ranks idle under the schedule."""

    cuts: tuple[str, ...]
    by: str
    """The balance by which cuts were proposed; empty if the plan names the cuts."""
    stages: tuple[PlannedStage, ...]
    ties: Mapping[str, tuple[int, ...]]
    """FQN of each parameter or buffer that several stages read, with those stages."""
    unread: tuple[str, ...]
    """FQNs of parameters and buffers that forward does not read, which are in no stage."""
    repeated: Mapping[str, int]
    """FQN of each module that forward calls more than once, with the number of calls; no stage can end behind it."""
    bubble: float
    """The share of the ranks' time that they idle where backward takes twice as long as forward and transfers take none."""
    by_the_book: float | None
    """The same share by ``(pp - 1) / (microbatches + pp - 1)``, for schedules that the formula is for; None for others."""

    def hops(self) -> list[tuple[int, bool, tuple[Crossing, ...]]]:
        """For each cut the stage before it, whether its two stages are on two ranks, and what crosses it in forward."""
        pairs = zip(self.stages, self.stages[1:], strict=False)
        return [(one.summary.index, one.rank != other.rank, one.summary.sends) for one, other in pairs]

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross all cuts in the forward of one microbatch; a value that crosses two cuts counts twice."""
        return sum(value.bytes for _, _, values in self.hops() for value in values)

    @property
    def sent_bytes(self) -> int:
        """The part of :attr:`crossing_bytes` that goes from one rank to another."""
        return sum(value.bytes for _, is_sent, values in self.hops() for value in values if is_sent)


def planned_stages(plan: Plan, say: Callable[[str], None] = lambda _: None) -> PlannedStages:
    """The stages of ``plan``, of one microbatch of its first batch; the plan's folders must be on ``sys.path``.

    ``param_dtype`` is applied as in capture: parameters and floating inputs of the units are cast. Raises :class:`PlanError`
    for a plan without ``[pipeline]``, :class:`StageError` for cuts that do not part the model, and what capture raises for a
    model that cannot be built or traced.
    """
    pipeline = plan.pipeline
    if pipeline is None or plan.model is None:
        raise PlanError(f"{plan.path} has no [pipeline]; add one, as in stages = 4, with pp = 4 in [parallel]")
    traced = _Traced.of(plan, say)
    # Before the cast: bytes are counted in the dtype of storage, crossing values in the dtype of compute.
    sizes = {fqn: (one.numel(), one.numel() * one.element_size()) for fqn, one in traced.model.named_parameters()}
    traced.compute_in_param_dtype(plan)
    say(f"cutting it into {plan.stages} stages")
    with naming_plan(plan):
        forward = traced.forward()
        cuts = pipeline.cuts or traced.proposed(forward, plan.stages, pipeline.balance)
        stages = split_forward(forward, cuts)
    return PlannedStages(
        cuts=tuple(cuts),
        by="" if pipeline.cuts else pipeline.balance,
        stages=tuple(_planned(stage.summary, plan, pipeline, sizes) for stage in stages),
        ties={tie.fqn: tie.stages for tie in stages.ties},
        unread=stages.unread,
        repeated=_repeated(forward),
        bubble=bubble(table_of(pipeline.schedule, plan.stages, plan.parallel.pp, plan.step.microbatches)),
        by_the_book=bubble_by_the_book(pipeline.schedule, plan.parallel.pp, plan.step.microbatches),
    )


def batch_rows(plan: Plan) -> list[int]:
    """Size of dimension 0 of each tensor in the plan's first batch, 1 for a scalar. The plan's folders must be on the path."""
    assert plan.model is not None
    _, batch, _ = import_model(plan.model, str(plan.path))
    data = first_batch(batch, plan.model.batch, mesh_with(plan.degrees, plan.parallel.ep), 0)
    return [one.shape[0] if one.dim() else 1 for one in pytree.tensors_in(data)]


def with_cuts(plan: Plan) -> Plan:
    """``plan`` with cuts written out if it asks for a number of stages; the plan's folders must be on ``sys.path``.

    Raises :class:`PlanError` if the cuts would differ from run to run, and what :func:`planned_stages` raises.
    """
    pipeline = plan.pipeline
    if pipeline is None or pipeline.cuts:
        return plan
    if pipeline.balance == "seconds":
        raise PlanError(
            f'{plan.path}: [pipeline] balance = "seconds" gives other cuts from run to run, which no check could hold; '
            "write the cuts that fxbucket stages proposes"
        )
    traced = _Traced.of(plan, lambda _: None)
    traced.compute_in_param_dtype(plan)
    with naming_plan(plan):
        cuts = traced.proposed(traced.forward(), plan.stages, pipeline.balance)
    return replace(plan, pipeline=replace(pipeline, cuts=tuple(cuts), stages=None))


@dataclass
class _Traced:
    """A plan's model, and the arguments that its first microbatch calls it with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, plan: Plan, say: Callable[[str], None]) -> _Traced:
        """Build the model of ``plan`` and its first microbatch."""
        assert plan.model is not None
        factory, batch, _ = import_model(plan.model, str(plan.path))
        torch.manual_seed(plan.run.seed)
        say("building the model")
        model = build(factory, plan.model.args, plan.model.factory)
        data = first_batch(batch, plan.model.batch, mesh_with(plan.degrees, plan.parallel.ep), 0)
        leaves, spec = pytree.tree_flatten(data)
        part = pytree.tree_unflatten(next(iter(microbatches(leaves, plan.step.microbatches))), spec)
        args, kwargs = split_of(model, part, plan.model.inputs).call(lambda *args, **kwargs: (args, kwargs), part)
        return cls(model, args, kwargs)

    def forward(self) -> Forward:
        """Trace it with its hooks, as a step is traced."""
        return trace_forward(self.model, self.args, self.kwargs, hooked=True)

    def proposed(self, forward: Forward, count: int, balance: str) -> list[str]:
        """Proposed cuts of ``forward``, which is left as it is: seconds are measured on another trace."""
        return cuts_of_forward(forward, count, balance, partial(seconds_of_parts, self.forward, self.args, self.kwargs))

    def compute_in_param_dtype(self, plan: Plan) -> None:
        """Have the model compute in ``param_dtype``, as FSDP2 does."""
        dtype = dtype_named(plan.parallel.param_dtype)
        if dtype is None:
            return

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return each_tensor(cast, args), each_tensor(cast, kwargs)

        # FSDP2 casts parameters as it gathers them, and floating inputs of each unit before its forward. Here no unit is
        # gathered: all parameters are cast at once, and a hook of each unit, which runs before the unit's own, casts its
        # inputs.
        for parameter in self.model.parameters():
            parameter.data = cast(parameter.data)
        for fqn in units_of(self.model, plan.bucket.plan):
            self.model.get_submodule(fqn).register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)
        self.args, self.kwargs = each_tensor(cast, self.args), each_tensor(cast, self.kwargs)


def _repeated(forward: Forward) -> dict[str, int]:
    """Modules that are called more than once, in order of first calls, a module before those inside it; with their calls."""
    calls = {fqn: calls for fqn, calls in forward.calls.items() if fqn and len(calls) > 1}
    return {fqn: len(calls[fqn]) for fqn in sorted(calls, key=lambda fqn: (calls[fqn][0][0], fqn.count(".")))}


def _planned(summary: Summary, plan: Plan, pipeline: Pipeline, sizes: Mapping[str, tuple[int, int]]) -> PlannedStage:
    rank = rank_of_stage(pipeline.schedule, plan.stages, plan.parallel.pp, summary.index)
    elements, bytes_ = (sum(sizes[fqn][which] for fqn in summary.parameters) for which in (0, 1))
    return PlannedStage(summary, rank, elements, bytes_)
