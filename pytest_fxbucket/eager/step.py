"""One step of a model as a trainer takes it: microbatches, clipping, torch's optimizers; and what it leaves on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pytest_fxbucket.capture.microbatches import microbatches
from pytest_fxbucket.capture.optimizers.state import rates, state_tensors
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.stepping import LEARNING_RATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_fxbucket.capture.optimizers.optimizing import Optimizing
    from pytest_fxbucket.capture.split_batch import Split
    from pytest_fxbucket.eager.wrapped import Wrapped
    from pytest_fxbucket.plan.schema import Step

Left = dict[tuple[str, str], Tensor]
"""By role and name, as a graph's inputs and outputs are called."""


class EagerStep:
    """Takes steps, and keeps model and optimizers."""

    def __init__(
        self,
        wrapped: Wrapped,
        split: Split,
        loss: Callable[[Any, Any], Any],
        step: Step,
        optimizing: Optimizing | None,
    ) -> None:
        self._wrapped, self._split, self._loss, self._step = wrapped, split, loss, step
        self.named: dict[str, nn.Parameter] = dict(wrapped.model.named_parameters())
        self._optimizers = optimizing.build(self.named) if optimizing is not None else None

    def take(self, batch: Any) -> Left:
        """Take one step on ``batch``, and say what it left: copies."""
        loss = self._backward(batch)
        gradients = {fqn: local(one.grad).clone() for fqn, one in self.named.items() if one.grad is not None}
        if self._step.clip_norm:
            nn.utils.clip_grad_norm_(self.named.values(), self._step.clip_norm)
        if self._optimizers is None:
            self._update(gradients)
        for optimizer in self._optimizers or ():
            optimizer.step()
        for parameter in self.named.values():
            parameter.grad = None
        return {("loss", ""): loss} | {("grad", fqn): grad for fqn, grad in gradients.items()} | self._held()

    def decay(self, factors: Mapping[str, float]) -> None:
        """Shrink learning rates, which are named as a graph's inputs."""
        for name in rates(self._optimizers or ()):
            _, number, _, place, _ = name.split(".")
            group = (self._optimizers or [])[int(number)].param_groups[int(place)]
            if "lr" in group:
                group["lr"] *= factors[name]

    def _backward(self, batch: Any) -> Tensor:
        count = self._step.microbatches
        leaves, spec = pytree.tree_flatten(batch)
        losses = []
        for number, own in enumerate(microbatches(leaves, count)):
            part = pytree.tree_unflatten(own, spec)
            output = self._split.call(self._wrapped.call(number == count - 1), part)
            loss = self._split.loss(self._loss, output, part)
            loss = loss / count if count > 1 else loss
            loss.backward()
            losses.append(loss.detach().clone())
        total: Tensor = reduce(torch.add, losses)
        return total

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, Tensor]) -> None:
        """The update that bitwise applies to a step without an optimizer."""
        for fqn, gradient in gradients.items():
            part = local(self.named[fqn])
            part.add_(gradient.to(part.dtype), alpha=-LEARNING_RATE)

    def _held(self) -> Left:
        left: Left = {("param", fqn): local(one).clone() for fqn, one in self.named.items()}
        left |= {("buffer", fqn): local(one).clone() for fqn, one in self._wrapped.model.named_buffers()}
        states: Sequence[Any] = state_tensors(self._optimizers, self.named) if self._optimizers else ()
        return left | {("state", one.fqn): local(one.tensor).clone() for one in states}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, without a graph; what is sparse is made dense."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    part = part.to_dense() if part.is_sparse else part
    return part.detach()
