"""Runs a user's graph transformations on a step, once, and checks what each left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.capture.roles import Parameter, StepGraph
from pytest_fxbucket.capture.twins import fake_twin
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.transforms.pairing import refuse_unpaired
from pytest_fxbucket.transforms.registry import refuse_order
from pytest_fxbucket.transforms.running import Stage, Transform, run_stages

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.graph import Made
    from pytest_fxbucket.train_step.live import Live


@dataclass(frozen=True)
class Transformed:
    """A step after all transformations."""

    step: StepGraph
    added: Mapping[str, torch.Tensor]
    """First tensors of state that was not there before."""
    removed: Mapping[str, torch.Tensor]
    """What state that is gone looked like: fake tensors."""


def described(made: Made, live: Live) -> StepGraph:
    """The step that transformations get."""
    import torch.distributed as dist

    return StepGraph(
        graphs={"joint": made.graph_module},
        inputs={"joint": made.inputs},
        outputs={"joint": made.outputs},
        parameters=_parameters(live),
        modules=tuple(fqn for fqn, _ in live.model.named_modules()),
        mesh=(),
        rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
    )


def transformed(
    step: StepGraph, states: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor], transforms: Sequence[Transform]
) -> Transformed:
    """Run ``transforms`` one after the other. ``states`` has the optimizers' tensors, ``shared`` what was added before.

    Raises :class:`CaptureError` if one breaks, or leaves a step that is not paired with its state.
    """
    begin = {value.fqn: states[value.fqn] for value in step.inputs["joint"] if value.role == "state"}
    state = dict(begin)
    stages = [_stage(transform) for transform in transforms]
    refuse_order(stages)
    staged = run_stages(stages, step, state)
    known = {fqn: shared[fqn] for fqn in state if fqn in shared and fqn not in begin}
    state.update(known)
    if known:
        refuse_unpaired(stages[-1].where, step, staged[-1].step, state)
    step = staged[-1].step if staged else step
    for graph_module in step.graphs.values():
        graph_module.recompile()
    added = {fqn: tensor for fqn, tensor in state.items() if fqn not in begin}
    removed = {fqn: fake_twin(FakeTensorMode(), tensor) for fqn, tensor in begin.items() if fqn not in state}
    return Transformed(step, added, removed)


def _stage(transform: Transform) -> Stage:
    function = getattr(transform, "func", transform)  # of a partial
    name = getattr(function, "__qualname__", type(function).__name__)
    return Stage(name, f"transform {name}", transform)


def _parameters(live: Live) -> tuple[Parameter, ...]:
    aliases: dict[str, list[str]] = {fqn: [] for fqn in live.params}
    for fqn, tensor in live.model.named_parameters(remove_duplicate=False):
        if (first := live.fqns[id(tensor)]) != fqn:
            aliases[first].append(fqn)
    return tuple(
        Parameter(fqn, tuple(aliases[fqn]), shape, shape, tensor.dtype, tensor.requires_grad, shape)
        for fqn, tensor in live.params.items()
        for shape in [tuple(tensor.shape)]
    )
