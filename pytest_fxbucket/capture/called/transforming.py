"""Runs a user's graph transformations on a step, once, and checks what each left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.called.pairing import refuse_unpaired
from pytest_fxbucket.capture.called.stand_ins import fake_twin
from pytest_fxbucket.capture.roles import Parameter, StepGraph
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

if TYPE_CHECKING:
    from pytest_fxbucket.capture.called.graph import Made
    from pytest_fxbucket.capture.called.live import Live

Transform = Callable[[StepGraph, dict[str, torch.Tensor]], StepGraph]
"""From a step and its state by name to the same step, changed. The graph is the transformation's own: it may work in place.

To add state: a placeholder, its :class:`Value` among the inputs at the same place, a new value among the outputs, and its first
tensor in the dict. To remove it: out of all of them.
"""


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
    for transform in transforms:
        name = getattr(transform, "__qualname__", type(transform).__name__)
        before = copy(step)
        with blamed(lambda name=name: f"transform {name}"):  # type: ignore[misc]
            step = transform(step, state)
        state.update({fqn: shared[fqn] for fqn in state if fqn in shared and fqn not in begin})
        refuse_unpaired(name, before, step, state)
    step.graphs["joint"].recompile()
    added = {fqn: tensor for fqn, tensor in state.items() if fqn not in begin}
    removed = {fqn: fake_twin(FakeTensorMode(), tensor) for fqn, tensor in begin.items() if fqn not in state}
    return Transformed(step, added, removed)


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
