"""The table of targets, the interface of a target, and what it is told of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.stages import Stages
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.words import nearest, one_or_other, show

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is told of a rank and of the run."""

    rank: int
    """Place of the rank in the pipeline, from 0."""
    pp: int
    """Number of ranks of the pipeline."""
    microbatches: int
    schedule: str = "1F1B"
    """One of :data:`~pytest_fxbucket.pipeline.schedules.SCHEDULES`; engines with schedules of their own do not read it."""
    loss: Loss | None = None
    """Makes a scalar of the model's output and a target. None: the model gives its loss, as output or as ``output.loss``."""
    group: dist.ProcessGroup | None = None
    """Process group of the pipeline's ranks; None for the default group."""
    device: str = "cpu"
    config: Any = None
    """Configuration of the engine itself, such as Megatron's ``ModelParallelConfig``."""


class Target(Protocol):
    """A pipeline engine: one call shape for all."""

    def stage(self, stages: Stages, index: int, setup: Setup) -> Any:
        """Stage ``index`` as the engine takes it."""

    def engine(self, stages: Stages, setup: Setup) -> Any:
        """What runs the stages of ``setup.rank``, in the engine's own classes."""


def loss_of(output: Any, target: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar to run backward from. Raises :class:`StageError` if ``output`` has none."""
    found: object = loss(output, target) if loss is not None else getattr(output, "loss", output)
    if isinstance(found, torch.Tensor) and not found.dim():
        return found
    what = f"a tensor of {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a value of type {type(found).__name__}"
    raise StageError(f"the loss of the last stage is {what}, expected a scalar tensor; give the setup a loss")


TARGETS = {
    "torch": "torch_pipelining:TorchTarget",
    "deepspeed": "deepspeed:DeepSpeedTarget",
    "megatron": "megatron:MegatronTarget",
}
"""The module in this folder and its class, by name of the target."""


def target_of(name: str) -> Target:
    """The target ``name``; for ``module:callable`` what that callable gives, called without arguments.

    Raises :class:`StageError` for an unknown name, :class:`PlanError` for a callable that cannot be imported.
    """
    if name in TARGETS:
        module, _, made = TARGETS[name].partition(":")
        found: Target = getattr(import_module(f"pytest_fxbucket.pipeline.targets.{module}"), made)()
        return found
    if ":" not in name:
        raise StageError(
            f"target {show(name)} is unknown, expected {one_or_other([*TARGETS, 'module:callable'])}{nearest(name, [*TARGETS])}"
        )
    found = import_callable(name, f"target {show(name)}")()
    for part in ("stage", "engine"):
        if not callable(getattr(found, part, None)):
            raise StageError(
                f"target {show(name)} gives a value of type {type(found).__name__} without {part}(), expected an object with "
                "stage(stages, index, setup) and engine(stages, setup)"
            )
    return found
