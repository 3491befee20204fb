"""The reference: each rank's model in plain eager torch, parameters whole, gradients averaged; no groups, no capture."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pytest_fxbucket.capture.names import units_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.step_runner import LEARNING_RATE
from suites.zoo.shelf import ZooModel


def eager_steps(model: ZooModel, plan: Plan, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Losses by rank and averaged whole gradients after each step, which ends with the update that captured steps get."""
    seed, parallel = plan.run.seed, plan.parallel
    modules = [built(model, seed) for _ in range(ranks)]
    if modules[0] is modules[-1]:  # as where a file builds its model when it is imported
        modules = [copy.deepcopy(module) for module in modules]
    copies = [_Copy(model, module, _dtype(parallel.param_dtype), plan) for module in modules]
    found = []
    for step in range(steps):
        losses = [one.step(model.batch(rank, step), seed + step) for rank, one in enumerate(copies)]
        gradients = averaged([one.gradients for one in copies], _dtype(parallel.reduce_dtype), copies[0].whole)
        for one in copies:
            one.update(gradients)
        found.append({"losses": losses, "gradients": gradients})
    return found


def averaged(each: Sequence[dict[str, Tensor]], dtype: torch.dtype | None, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over ranks, summed in ``dtype`` and given in the parameters' own."""
    names = [name for name in each[0] if all(name in other for other in each)]
    found = {}
    for name in names:
        parts = [_cast(gradients[name], dtype) for gradients in each]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found[name] = (total / len(parts)).to(whole[name].dtype)
    return found


def built(model: ZooModel, seed: int) -> nn.Module:
    """The model, as every rank builds it."""
    torch.manual_seed(seed)
    return model.build()


class _Copy:
    """One rank's model: whole parameters in their own dtype, computed with in the plan's, as FSDP2's mixed precision."""

    def __init__(self, model: ZooModel, module: nn.Module, dtype: torch.dtype | None, plan: Plan) -> None:
        self._loss, self._dtype, self._targets = model.loss, dtype, model.targets
        self._module, self._parts = module, plan.step.microbatches
        self._reduced_in = _dtype(plan.parallel.reduce_dtype)
        self.gradients: dict[str, Tensor] = {}
        """Of each parameter that got one in the last step."""
        for unit in units_of(self._module, plan.bucket.plan):
            self._module.get_submodule(unit).register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        self.whole = {name: parameter.detach().clone() for name, parameter in self._module.named_parameters()}
        self._put()

    def step(self, batch: Any, seed: int) -> Tensor:
        """Go forward and backward; the loss."""
        torch.manual_seed(seed)
        leaves, spec = pytree.tree_flatten(batch)
        parts = [leaf.chunk(self._parts) if isinstance(leaf, Tensor) else [leaf] * self._parts for leaf in leaves]
        losses, self.gradients = [], {}
        for own in zip(*parts, strict=True):
            losses.append(self._backward(pytree.tree_unflatten(list(own), spec)))
            self._take_gradients()
        return functools.reduce(torch.add, losses)

    def _backward(self, batch: Any) -> Tensor:
        """Of one microbatch, whose loss is its part of the mean."""
        taken, read = batch if self._targets else (batch, batch)
        inputs = pytree.tree_map(self._cast, (taken,) if isinstance(taken, Tensor) else taken)
        output = self._module(**inputs) if isinstance(inputs, dict) else self._module(*inputs)
        loss: Tensor = (self._loss(output, read) if self._loss is not None else own_loss(output)) / self._parts
        loss.backward()
        return loss.detach().clone()

    def _take_gradients(self) -> None:
        """Add what a microbatch left to those before it: dense, and in the dtype that they are reduced in, as FSDP2 does."""
        for name, parameter in self._module.named_parameters():
            if parameter.grad is None:
                continue
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad.detach()
            own = _cast(dense, self._reduced_in)
            if own.dtype == parameter.dtype:
                self.gradients[name] = own.clone()
            else:
                self.gradients[name] = self.gradients[name] + own if name in self.gradients else own.clone()
                parameter.grad = None

    def update(self, gradients: dict[str, Tensor]) -> None:
        """The update that captured steps get."""
        for name, gradient in gradients.items():
            self.whole[name].add_(gradient, alpha=-LEARNING_RATE)
        self._put()

    def _put(self) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.grad = None
            parameter.data = self._cast(self.whole[name]).clone()

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """As FSDP2 does with those of its units."""
        return pytree.tree_map(self._cast, args), pytree.tree_map(self._cast, kwargs)

    def _cast(self, value: Any) -> Any:
        return _cast(value, self._dtype) if isinstance(value, Tensor) else value


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype``; integers and complex numbers as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def own_loss(output: Any) -> Tensor:
    """What a plan without a loss takes."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        (scalar,) = (item for item in output if isinstance(item, Tensor) and item.dim() == 0)
        return scalar
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found
