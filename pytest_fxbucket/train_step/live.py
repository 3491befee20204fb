"""What a step reads and writes, by name, as it is at one moment: parameters, buffers, optimizers' state, learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step.sharing import called

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Live:
    """A model and its optimizers, looked at once; tensors are the user's own.

    Raises :class:`CaptureError` for an optimizer with a parameter that ``model`` does not have, or that another one has too.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.model, self.optimizers = model, optimizers
        self.params: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
        self.fqns = {id(tensor): fqn for fqn, tensor in self.params.items()}
        self.owners: dict[str, Optimizer] = {}
        """By parameter the optimizer that has it."""
        for i, optimizer in enumerate(optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._own(optimizer, f"group {j} of optimizer {i} ({type(optimizer).__name__})", parameter)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the gradients that were there first, by what they are called in a sentence."""
        gradients = {fqn: p.grad for fqn, p in self.params.items() if p.grad is not None}
        roles = {"param": self.params, "buffer": self.buffers, "grad": gradients}
        return {called(role, fqn): tensor for role, tensors in roles.items() for fqn, tensor in tensors.items()}

    def _own(self, optimizer: Optimizer, where: str, parameter: torch.Tensor) -> None:
        fqn = self.fqns.get(id(parameter))
        if fqn is None:
            raise CaptureError(
                f"{where} has a parameter of shape {tuple(parameter.shape)} that the model does not have; give "
                "capture_step the model whose parameters the optimizer has"
            )
        if self.owners.setdefault(fqn, optimizer) is not optimizer:
            raise CaptureError(f"{where} has parameter {fqn}, which another optimizer has too; give each parameter to one")

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every parameter group, with its name ``optimizers.<i>.groups.<j>``."""
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                yield f"optimizers.{i}.groups.{j}", group

    def states(self) -> dict[str, torch.Tensor]:
        """Tensors of the optimizers' state, by ``<parameter>.<key>``."""
        return {
            f"{fqn}.{key}": value
            for fqn, optimizer in self.owners.items()
            for key, value in self.state_of(fqn, optimizer).items()
            if isinstance(value, torch.Tensor)
        }

    def state_of(self, fqn: str, optimizer: Optimizer) -> Mapping[str, Any]:
        """State of one parameter; empty if it has none yet."""
        found: Mapping[str, Any] = optimizer.state.get(self.params[fqn], {})
        return found

    def rates(self) -> dict[str, Any]:
        """Learning rates, by ``optimizers.<i>.groups.<j>.lr``: numbers, or tensors if the user made them so."""
        return {f"{name}.lr": group["lr"] for name, group in self.groups() if "lr" in group}


def rate_tensor(rate: Any) -> torch.Tensor:
    """A learning rate as an input of the graph: float64 without dimensions, or the user's own tensor."""
    return rate if isinstance(rate, torch.Tensor) else torch.tensor(float(rate), dtype=torch.float64)
