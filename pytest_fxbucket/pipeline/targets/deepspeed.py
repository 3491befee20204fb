"""DeepSpeed: stages as layers of its ``PipelineModule``, ties as its ``TiedLayerSpec``.

DeepSpeed runs backward for each floating tensor of a layer's outputs by itself, and wants a gradient for each. Bits would
differ from the model's, and a mask could not cross. So the flat tuple between stages has one tensor, the carrier of all that
crosses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.errors import StageError, named
from pytest_fxbucket.pipeline.stages import Stages
from pytest_fxbucket.pipeline.targets.carrier import CarriedStage
from pytest_fxbucket.pipeline.targets.registry import Setup, loss_of

Flat = torch.Tensor | tuple[torch.Tensor, ...]


class DeepSpeedTarget:
    """The engine is the ``PipelineModule`` that ``deepspeed.initialize(model=...)`` takes.

    Its data are pairs ``(stages.batch(...), target)``. Each rank has its stage's parameters alone. A tie is a tied
    layer with its FQN as key (slashes for dots), and DeepSpeed sums its gradients. Schedules are DeepSpeed's own.
    """

    def stage(self, stages: Stages, index: int, setup: Setup) -> nn.Module:
        """A layer that takes and gives a flat tuple of tensors; the last one gives what the model gives."""
        return FlatLayer(stages, index)

    def engine(self, stages: Stages, setup: Setup) -> Any:
        """A ``PipelineModule``; ``deepspeed.init_distributed`` must have run. Raises :class:`StageError` without DeepSpeed."""
        try:
            pipe = import_module("deepspeed.pipe")
        except ImportError as error:
            raise StageError(f"target deepspeed needs the package deepspeed (pip install deepspeed): {named(error)}") from error
        if len(stages) != setup.pp:
            raise StageError(f"target deepspeed runs one stage a rank, but there are {len(stages)} stages on {setup.pp} ranks")
        held = [_ties(stages, index) for index in range(len(stages))]
        most = max(map(len, held))
        layers: list[Any] = []
        for index, fqns in enumerate(held):
            # Every stage gets as many layers, so that DeepSpeed's uniform partition of layers has its borders between stages.
            layers += [passed_on] * (most - len(fqns))
            for fqn in fqns:
                key = fqn.replace(".", "/")  # DeepSpeed names a module by it
                layers.append(
                    pipe.TiedLayerSpec(key, Tied, stages[index], fqn, forward_fn=passed_by, tied_weight_attr=["weight"])
                )
            layers.append(pipe.LayerSpec(FlatLayer, stages, index))

        def loss(output: Any, target: Any) -> torch.Tensor:
            return loss_of(output, target, setup.loss)

        return pipe.PipelineModule(layers, num_stages=setup.pp, loss_fn=loss, partition_method="uniform")


def _ties(stages: Stages, index: int) -> list[str]:
    """FQNs of the tied parameters of a stage; buffers have no gradients to sum."""
    return [tie.fqn for tie in stages.ties if index in tie.stages and tie.fqn in stages[index].summary.parameters]


class FlatLayer(nn.Module):
    """A stage with one argument, a tensor or a flat tuple of them."""

    def __init__(self, stages: Stages, index: int) -> None:
        super().__init__()
        self.carried = CarriedStage(stages[index])

    def forward(self, inputs: Flat) -> Any:
        """Give a flat tuple, or what the model gives."""
        given = self.carried(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        return given if self.carried.sent is None else (given,)


class Tied(nn.Module):
    """Has a tied parameter, which the stage's layer reads."""

    def __init__(self, stage: nn.Module, fqn: str) -> None:
        super().__init__()
        self.weight = stage.get_parameter(fqn)

    def forward(self, inputs: Flat) -> Flat:
        """Give what it takes."""
        return inputs


def passed_by(module: nn.Module, inputs: Flat) -> Flat:
    """The forward of a tied layer: it gives what it takes."""
    return inputs


def passed_on(inputs: Flat) -> Flat:
    """A layer that only fills up the number of layers of a stage: it gives what it takes."""
    return inputs
