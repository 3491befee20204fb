"""A step in pipeline stages, as one rank has it: a graph for each kind of work of each of its stages, and what crosses.

A stage's parameters are gathered once a step (``unshard``), each microbatch goes forward and backward on them, and the sums of
the gradients are reduced once (``reduce``). Schedules that fill bubbles with gradients of weights have backward in two parts:
``input``, what the stage before waits for, and ``weight``. Behind all, ``ties`` sums gradients of what several stages read, and
``update`` runs clipping and optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Work = Literal["unshard", "forward", "backward", "input", "weight", "reduce"]
TIES = "ties"
UPDATE = "update"


def phase_of(stage: int, work: Work) -> str:
    """The graph of the stage's ``work``: ``stage 0 forward``."""
    return f"stage {stage} {work}"


def stage_of(phase: str) -> int | None:
    """The stage that a graph is of; None for one that is of none."""
    name, _, rest = phase.partition(" ")
    return int(rest.partition(" ")[0]) if name == "stage" else None


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that goes from stage to stage."""

    name: str
    """Name of its node in the graph; for a tensor of the batch its path in the arguments, such as ``labels``."""
    module: str
    """FQN of the module that makes it; empty for the root, and for a tensor of the batch."""
    stage: int
    """The stage that makes it; 0 for a tensor of the batch, which the first stage is given."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """As the model has them: kernels may round otherwise if a copy has others."""
    dtype: torch.dtype
    bytes: int
    """Bytes of its elements and not of a storage: it is sent as a tensor of its own, even if it is a view where it is made."""

    @classmethod
    def of(cls, name: str, module: str, stage: int, value: torch.Tensor) -> Crossing:
        """``value``, which may be fake, as what crosses."""
        layout = tuple(value.shape), tuple(value.stride()), value.dtype
        return cls(name, module, stage, *layout, value.numel() * value.element_size())


@dataclass(frozen=True, slots=True)
class Pipelined:
    """How the stages of a step are run; the same on every rank."""

    schedule: str
    """As the plan names it."""
    microbatches: int
    pp_places: tuple[int, ...]
    """For each stage the place along ``pp`` of the rank that has it."""
    forward: tuple[tuple[Crossing, ...], ...]
    """For each stage but the last what it sends to the next one, for one microbatch, in order."""
    backward: tuple[tuple[Crossing, ...], ...]
    """For each stage but the last what the next one sends back to it."""
    ties: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and stages of each parameter that several stages have a gradient of, in registration order."""
    group: str
    """Name of the process group along ``pp``."""

    @property
    def stages(self) -> int:
        """How many there are in all."""
        return len(self.pp_places)

    def runs_of(self, phase: str) -> int:
        """How often a step runs the graph ``phase``: for each microbatch, but once if it gathers, sums or updates."""
        return self.microbatches if phase.rpartition(" ")[2] in ("forward", "backward", "input", "weight") else 1
