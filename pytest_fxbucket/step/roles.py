"""What a captured step is: frozen data about graphs, and the role of each of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.step.pipelined import Pipelined

Role = Literal[
    "param", "buffer", "held", "state", "hyper", "batch", "loss", "grad", "carried", "value", "whole", "unreduced", "crossing"
]
WITHIN: tuple[Role, ...] = ("carried", "whole", "unreduced", "crossing")
"""Roles of what goes from graph to graph of one step."""
Direction = Literal["forward", "backward", "optimizer"]
Phase = str
"""Name of a graph of a step: joint; forward and backward; setup, steady and cleanup of a step whose work crosses iterations:
its first call, each later one, what finishes the last; of pipeline stages as :mod:`pytest_fxbucket.step.pipelined` has them;
where somebody split FSDP's collectives off, as :mod:`pytest_fxbucket.step.graph_sequence` has them.
"""


Key = tuple[str, str]
"""Role and name of a value, by which the graphs of a step share it."""


@dataclass(frozen=True, slots=True)
class Value:
    """One input or output of a graph."""

    role: Role
    """param, buffer, held (in an attribute or a global variable), state (of an optimizer), hyper (a learning rate), batch,
    loss, grad, carried (from one call to the next); value if nothing is known of it. Where graphs hand values on: whole (a
    parameter, gathered), unreduced (its gradient before it is reduced), crossing (made in one graph, read in another)."""
    fqn: str
    """FQN of the parameter, buffer or attribute, of its state ``<FQN>.<key>``; path of the leaf in the batch, or a number."""
    shape: tuple[int, ...]
    """Shape as the graph sees it: for parameters and their gradients the padded local shard."""
    dtype: torch.dtype | None

    @property
    def key(self) -> Key:
        """Role and name; see :data:`Key`."""
        return self.role, self.fqn


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, in registration order; tied parameters are one."""

    fqn: str
    aliases: tuple[str, ...]
    """Other FQNs of the same tensor, in registration order."""
    shape: tuple[int, ...]
    """Full shape, before it is sharded."""
    shard_shape: tuple[int, ...]
    """Shape of a rank's part; of a shard with dimension 0 padded to ceil(rows / ranks)."""
    dtype: torch.dtype
    trainable: bool
    local_shape: tuple[int, ...] = ()
    """Shape of what the data-parallel ranks of one tp and ep rank hold together, which is what modules read."""
    tp_dim: int | None = None
    """Dimension that is sharded over tp; None if every tp rank has all of it."""
    is_expert: bool = False
    """Whether dimension 0 is sharded over ep."""
    places: tuple[int, ...] = ()
    """Where ``fqn`` and each of ``aliases`` stands among all names, as registered; empty: behind those that have a place."""


def names_of_parameters(parameters: Sequence[Parameter]) -> dict[str, str]:
    """Map every name of every parameter, in registration order, to its canonical one."""
    placed: list[tuple[float, str, str]] = []
    for one in parameters:
        names = (one.fqn, *one.aliases)
        placed += zip(one.places or [inf] * len(names), names, [one.fqn] * len(names), strict=True)
    return {name: fqn for _, name, fqn in sorted(placed, key=itemgetter(0))}


@dataclass(frozen=True, slots=True)
class MeshDim:
    """One dimension of the device mesh."""

    name: str
    size: int


class OptimizerBuilder(Protocol):
    """What makes the optimizers of a step; plain data that goes to the ranks."""

    def build(self, parts: Mapping[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
        """Make the optimizers over ``parts``, which has all parameters by FQN."""

    def rates_after(self, taken: int, parameters: Sequence[Parameter]) -> dict[str, float]:
        """Learning rates behind ``taken`` steps of the groups that have a schedule, by the names of a graph's inputs."""

    def state(self, parts: Mapping[str, torch.Tensor], with_gradient: set[str]) -> dict[tuple[str, str], torch.Tensor]:
        """Give state before the first step, and the learning rates, by role and name as graphs' inputs have them."""


@dataclass(frozen=True, slots=True)
class Transformed:
    """What a transformation says it did. Checks never believe it; people read it."""

    transformation: str
    done: tuple[str, ...] = ()
    """A clause for each thing that was changed."""
    left: tuple[tuple[str, str], ...] = ()
    """(what was not changed, why)."""


@dataclass(frozen=True)
class StepGraph:
    """A training step as one rank traced it, not bucketed. Nobody changes its graphs: passes work on copies."""

    graphs: Mapping[Phase, fx.GraphModule]
    inputs: Mapping[Phase, tuple[Value, ...]]
    outputs: Mapping[Phase, tuple[Value, ...]]
    parameters: tuple[Parameter, ...]
    modules: tuple[str, ...]
    """FQN of every module, in registration order; the root is ''."""
    mesh: tuple[MeshDim, ...]
    rank: int
    optimizing: OptimizerBuilder | None = None
    """What makes the optimizers whose update the step has; None if it has none."""
    notes: tuple[str, ...] = ()
    """One clause for each thing that was traced in another way than the model has it, with the same numbers."""
    transformed: tuple[Transformed, ...] = ()
    """What transformations say they did, in their order."""
    first_state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """First tensors of state that transformations and overrides added, by FQN; not fake."""
    example_inputs: Mapping[Phase, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Real inputs that came with a graph that somebody else traced; none of what graphs hand to each other."""
    copies: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """By FQN, sets of ranks that hold the same part of a parameter and its gradient, as the maker says; "": of the loss."""
    pipelined: Pipelined | None = None
    """How the graphs of its pipeline stages are run; None for a step without."""

    @property
    def names(self) -> dict[str, str]:
        """Every name of every parameter, in registration order, to its canonical one."""
        return names_of_parameters(self.parameters)

    @property
    def has_roles(self) -> bool:
        """False for a bare graph, of whose inputs nothing is known."""
        return all(value.role != "value" for phase in self.inputs for value in self.inputs[phase])
