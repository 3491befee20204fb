"""The optimizers of a plan, over one rank's parts of a model's parameters: fake ones in capture, real ones in the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.optimizers.optimizer import build_optimizers
from pytest_fxbucket.capture.optimizers.state import make_state, rates, state_tensors
from pytest_fxbucket.plan.resolved import entries_of

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.roles import Parameter
    from pytest_fxbucket.plan import schema
    from pytest_fxbucket.plan.selector import ResolvedEntry


@dataclass(frozen=True, slots=True)
class Optimizing:
    """What makes the optimizers; plain data that goes to the ranks."""

    specs: tuple[schema.Optimizer, ...]
    trainable: tuple[str, ...]
    """FQNs in registration order."""
    entries: tuple[ResolvedEntry, ...]
    """Of the bucket plan."""
    modules: tuple[str, ...]
    aliases: Mapping[str, str]

    def build(self, parts: Mapping[str, torch.Tensor]) -> list[Optimizer]:
        """The optimizers over ``parts``, which has all parameters by FQN. Raises PlanError as build_optimizers does."""
        return build_optimizers(self.specs, {fqn: parts[fqn] for fqn in self.trainable}, self.entries, self)

    def state(self, parts: Mapping[str, torch.Tensor], with_gradient: set[str]) -> dict[tuple[str, str], torch.Tensor]:
        """State before the first step, and the learning rates, by role and name as graphs' inputs have them."""
        import torch

        optimizers = self.build(parts)
        make_state(optimizers, [part for fqn, part in parts.items() if fqn in with_gradient])
        found = {("state", one.fqn): one.tensor for one in state_tensors(optimizers, parts)}
        return found | {("hyper", fqn): torch.tensor(rate, dtype=torch.float64) for fqn, rate in rates(optimizers).items()}


def optimizing_of(plan: schema.Plan, parameters: Sequence[Parameter], modules: Sequence[str]) -> Optimizing:
    """What makes the optimizers of ``plan``. Raises PlanError for entries that cannot be resolved."""
    aliases = {alias: parameter.fqn for parameter in parameters for alias in parameter.aliases}
    entries = entries_of(plan, [parameter.fqn for parameter in parameters], modules, aliases).entries
    trainable = tuple(parameter.fqn for parameter in parameters if parameter.trainable)
    return Optimizing(plan.optimizer, trainable, entries, tuple(modules), aliases)
