"""Megatron: stages as model chunks with ``set_input_tensor``, and the ``forward_step`` function that its schedules call.

Megatron sends one tensor of one dtype between stages, and runs backward from it: the carrier of all that crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.stages import Stages
from pytest_fxbucket.pipeline.targets.carrier import CarriedStage
from pytest_fxbucket.pipeline.targets.registry import Setup, loss_of

Shape = tuple[int, ...]
NONE: Shape = (1, 1, 1)
"""Shape for the ends of the pipeline, where nothing is received or sent."""
Given = tuple[torch.Tensor, Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]]


class MegatronTarget:
    """The engine's ``arguments`` are what the function of Megatron's ``get_forward_backward_func()`` is called with.

    Data are pairs ``(stages.batch(...), target)``: the first stage reads the batch, the last one the target, others neither.
    Megatron divides the loss by the number of microbatches.
    """

    def stage(self, stages: Stages, index: int, setup: Setup) -> MegatronChunk:
        """A model chunk; ``setup.config`` is its ``config``, whose ``pipeline_dtype`` is that of what is sent (float32)."""
        return MegatronChunk(stages, index, setup)

    def engine(self, stages: Stages, setup: Setup) -> MegatronRun:
        """The rank's chunk, and the function that runs it. Raises :class:`StageError` unless there is one stage a rank."""
        if len(stages) != setup.pp:
            raise StageError(f"target megatron runs one stage a rank, but there are {len(stages)} stages on {setup.pp} ranks")
        return MegatronRun(self.stage(stages, setup.rank, setup), setup)


class MegatronChunk(nn.Module):
    """A stage as Megatron's schedules drive a model: its input is set by ``set_input_tensor`` before the call, not passed."""

    def __init__(self, stages: Stages, index: int, setup: Setup) -> None:
        super().__init__()
        self.config, self.model_type = setup.config, "encoder_or_decoder"
        dtype = getattr(setup.config, "pipeline_dtype", None) or torch.float32
        self.carried = CarriedStage(stages[index], dtype, dims=3)
        self.pre_process, self.post_process = self.carried.received is None, self.carried.sent is None
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: torch.Tensor | Sequence[torch.Tensor | None] | None) -> None:
        """Take what the stage before sent; of the first stage None."""
        self._input = input_tensor if input_tensor is None or isinstance(input_tensor, torch.Tensor) else input_tensor[0]

    def forward(self, *batch: torch.Tensor) -> Any:
        """Run on the tensor that was set, or on the first stage on the ``batch``."""
        if self.carried.received is None:
            values: Sequence[torch.Tensor] = batch
        elif self._input is None:
            raise StageError(f"stage {self.carried.stage.summary.index} has no input; call set_input_tensor before it runs")
        else:
            values, self._input = (self._input,), None
        return self.carried(*values)


@dataclass(frozen=True)
class MegatronRun:
    """What Megatron's schedules are called with on a rank."""

    model: MegatronChunk
    setup: Setup

    def forward_step(self, data_iterator: Iterator[Any] | None, model: Any, *_: Any) -> Given:
        """Megatron's ``forward_step_func``: the chunk's output, and a function from the last stage's output to the loss."""
        chunk = self.model
        reads = data_iterator is not None and (chunk.pre_process or chunk.post_process)
        batch, target = next(data_iterator) if reads else ((), None)  # type: ignore[arg-type]  # `reads` says that there is one

        def loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found = loss_of(output, target, self.setup.loss)
            return found, {"loss": found.detach().clone()}  # a clone, since the schedule divides the loss itself in place

        return model(*batch) if chunk.pre_process else model(), loss

    def shapes(self, *_: Any) -> tuple[list[Shape], list[Shape]]:
        """Megatron's ``adjust_tensor_shapes_fn``: shapes of what is received and sent, in its three dimensions."""
        received, sent = (one and one.shape for one in (self.model.carried.received, self.model.carried.sent))
        return [received or NONE], [sent or NONE]

    def arguments(self, data_iterator: Any) -> dict[str, Any]:
        """Keyword arguments for the schedule, which asks for a length and a batch size, and reads the shapes instead."""
        return {
            "forward_step_func": self.forward_step,
            "data_iterator": data_iterator,
            "model": self.model,
            "num_microbatches": self.setup.microbatches,
            "seq_length": 1,
            "micro_batch_size": 1,
            "adjust_tensor_shapes_fn": self.shapes,
        }
