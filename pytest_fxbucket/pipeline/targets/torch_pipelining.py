"""torch.distributed.pipelining: a ``PipelineStage`` for each stage, and torch's schedule that runs those of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pytest_fxbucket.capture.model import fake_twins, in_modules
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.pipelining import has_one_stage_a_rank, schedule_class
from pytest_fxbucket.pipeline.schedules import owners_of
from pytest_fxbucket.pipeline.stages import Stage, Stages
from pytest_fxbucket.pipeline.targets.registry import Setup, loss_of
from pytest_fxbucket.step.pipelined import Crossing


class TorchTarget:
    """Stages that take and give flat tuples of contiguous tensors; the engine is one of torch's schedules.

    Call its ``step`` on the first rank with the tensors of ``stages.batch(...)``, each the concatenation of all microbatches;
    on the last rank with ``target`` and ``losses``, and with ``return_outputs=False`` if outputs cannot be concatenated, as
    losses. Gradients are sums over microbatches.
    """

    def stage(self, stages: Stages, index: int, setup: Setup) -> PipelineStage:
        """A ``PipelineStage``; its process group must be there.

        It is told the shapes of what crosses. Otherwise torch would find them by running each stage on memory that nobody has
        written, labels and indices included.
        """
        return _stage(stages, index, setup, _alone(stages))

    def engine(self, stages: Stages, setup: Setup) -> Any:
        """An object of torch's class for ``setup.schedule``. Raises :class:`StageError` for numbers that do not fit it."""
        owners = owners_of(setup.schedule, len(stages), setup.pp, setup.microbatches)
        sent = _alone(stages)
        own = [_stage(stages, index, setup, sent) for index, rank in enumerate(owners) if rank == setup.rank]

        def loss(outputs: Any, target: Any) -> torch.Tensor:
            flat = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            return loss_of(stages[-1].restored(flat), target, setup.loss)

        given: Any = own[0] if has_one_stage_a_rank(setup.schedule) else own
        return schedule_class(setup.schedule)(given, setup.microbatches, loss_fn=loss, scale_grads=False)


Sent = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def _stage(stages: Stages, index: int, setup: Setup, sent: Sequence[Sent]) -> PipelineStage:
    received, given = sent[index]
    device, wrapped = torch.device(setup.device), Contiguous(stages[index])
    return PipelineStage(wrapped, index, len(stages), device, input_args=received, output_args=given, group=setup.group)


def _alone(stages: Stages) -> list[Sent]:
    """For each stage the tensors that it receives and sends, without data; they require grad where those of a run do."""
    # Stages are run one after the other on fake tensors, since only a run tells which outputs require grad. What they hold is
    # fake, too: an operator that is given nothing fake, as a count that goes up by one, would really run.
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        values = tuple(torch.empty_strided(one.shape, one.strides, dtype=one.dtype) for one in stages[0].summary.receives)
        for stage in stages:
            with in_modules(stage, fake_twins(stage, mode)):
                given = Contiguous(stage, stage.computed)(*values)
            found.append((tuple(map(_without_data, values)), tuple(map(_without_data, given))))
            values = tuple(value.detach().requires_grad_(value.requires_grad) for value in given)
    return found


def _without_data(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return made.requires_grad_(value.requires_grad)


class Contiguous(nn.Module):
    """A stage that takes and gives contiguous tensors, as back ends send them, and computes on the strides that the model has.

    A value that is dense in another order of dimensions is sent in the order of its memory, without a copy; other values are
    copied.
    """

    def __init__(self, stage: Stage, run: Callable[..., Sequence[torch.Tensor]] | None = None) -> None:
        super().__init__()
        self.stage, self._run = stage, run or stage.flat
        self._receives = () if stage.summary.index == 0 else stage.summary.receives

    def forward(self, *received: torch.Tensor) -> Any:
        """Flat tensors in, flat tensors out; the last stage gives all that its result holds."""
        if self._receives:
            received = tuple(_traced(value, one) for value, one in zip(received, self._receives, strict=True))
        given: Sequence[torch.Tensor] = self._run(*received)
        if self.stage.summary.sends:
            given = tuple(_sent(value, one) for value, one in zip(given, self.stage.summary.sends, strict=True))
        return tuple(map(_own, given))


def _order(one: Crossing) -> Sequence[int] | None:
    """Dimensions from the outermost in memory to the innermost; None if memory has gaps, or if elements share memory."""
    # Dense if from the innermost dimension outwards each stride is the product of the sizes within.
    order = sorted(range(len(one.shape)), key=lambda dim: (-one.strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if one.shape[dim] != 1 and one.strides[dim] != step:
            return None
        step *= one.shape[dim]
    return order


def _sent(value: torch.Tensor, one: Crossing) -> torch.Tensor:
    order = _order(one)
    return value.contiguous() if order is None else value.permute(tuple(order)).contiguous()


def _own(value: torch.Tensor) -> torch.Tensor:
    """A clone of ``value`` if it is a view or a leaf: torch detaches outputs in place behind backward.

    Views cannot be detached in place, and a leaf such as a parameter would be lost to autograd.
    """
    return value.clone() if value._is_view() or value.is_leaf else value


def _traced(value: torch.Tensor, one: Crossing) -> torch.Tensor:
    order = _order(one)
    if order is None:
        made: torch.Tensor = _WithStrides.apply(value, one.strides)
        return made
    return value.permute(tuple(order.index(dim) for dim in range(len(order))))


class _WithStrides(torch.autograd.Function):
    """A copy in memory of other strides; the copy's gradient is the gradient of the value."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
        made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        # An expanded dimension (stride 0) is one element in memory: torch refuses to copy into it as a whole.
        once = tuple(slice(None) if stride else slice(1) for stride in strides)
        made[once].copy_(value[once])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].contiguous(), None
