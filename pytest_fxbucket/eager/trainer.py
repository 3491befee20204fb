"""What takes an eager step: a trainer of the user's own, or the plan's model as torch wraps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pytest_fxbucket.capture.microbatches import microbatches
from pytest_fxbucket.compat import pytree

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.split_batch import Split
    from pytest_fxbucket.eager.wrapped import Wrapped
    from pytest_fxbucket.plan.schema import Step


class Trainer(Protocol):
    """A step in two halves, on this rank of a process group that is there already. What ``[eager] factory`` gives.

    Parameters are this rank's parts, plain tensors or DTensors, under the FQNs of the plan's model; what wrappers put into
    names (``module.``, ``_orig_mod.``, ``_checkpoint_wrapped_module.``) is left out. Their first values, and those of buffers,
    are written by the check: those that the captured step begins with.
    """

    @property
    def model(self) -> nn.Module:
        """Whose parameters and buffers are compared."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """In the order of the plan's; the check shrinks their learning rates between steps. Empty in a plan that has none."""

    def backward(self, batch: Any) -> Tensor:
        """Forward and backward of a batch of the plan's: the loss. Leaves reduced gradients in ``.grad``."""

    def update(self) -> None:
        """Clip, and let the optimizers step; not called in a plan without an optimizer. ``.grad`` is cleared by the check."""


class TorchsOwn:
    """The plan's model under torch's parallelism: microbatches, ``clip_grad_norm_``, torch's optimizers."""

    def __init__(
        self, wrapped: Wrapped, split: Split, loss: Callable[[Any, Any], Any], step: Step, optimizers: Sequence[Optimizer]
    ) -> None:
        self.model, self.optimizers = wrapped.model, optimizers
        self._wrapped, self._split, self._loss, self._step = wrapped, split, loss, step

    def backward(self, batch: Any) -> Tensor:
        """The mean of the microbatches' losses."""
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

    def update(self) -> None:
        """Clip as the plan says, then step."""
        if self._step.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._step.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
