"""Takes eager steps, by a trainer of the user's own or the plan's model as torch wraps it, and reads what each step leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import isclose
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pytest_fxbucket.capture.batch import microbatches
from pytest_fxbucket.capture.optimizers.state import rates, state_tensors
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.modules import plain_fqn
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.step_runner import LEARNING_RATE
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pytest_fxbucket.capture.batch import BatchSplit
    from pytest_fxbucket.eager.wrapped import ShardedModel
    from pytest_fxbucket.plan.schema_model import Step


class Trainer(Protocol):
    """A step in two halves, on this rank of a process group that is there already. What ``[eager] factory`` gives.

    Parameters are this rank's parts, plain tensors or DTensors, under the FQNs of the plan's model; what wrappers put into
    names (``module.``, ``_orig_mod.``, ``_checkpoint_wrapped_module.``) is left out. Their first values, and those of buffers,
    are written by the check: those that the captured step begins with.
    """

    @property
    def model(self) -> nn.Module:
        """The model whose parameters and buffers are compared."""

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
        self,
        wrapped: ShardedModel,
        split: BatchSplit,
        loss: Callable[[Any, Any], Any],
        step: Step,
        optimizers: Sequence[Optimizer],
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
        self._wrapped.finish()
        total: Tensor = reduce(torch.add, losses)
        return total

    def update(self) -> None:
        """Clip as the plan says, then step."""
        if self._step.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._step.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()


# Eager steps of a trainer, and what each leaves on this rank.


Left = dict[tuple[str, str], Tensor]
"""What a step left: tensors by role and name, as a graph's inputs and outputs have them."""


class OtherModelError(FxbucketError):
    """A trainer's model is not the plan's."""


class EagerStep:
    """Takes steps of ``trainer``; ``updates`` says whether they end with its optimizers' updates."""

    def __init__(self, trainer: Trainer, *, updates: bool) -> None:
        self.trainer, self._updates = trainer, updates
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = False  # torch's choice on the CPU, where the step was traced
        self.named = {plain_fqn(fqn, trainer.model): one for fqn, one in trainer.model.named_parameters()}

    def begin(self, start: Left) -> None:
        """Give parameters and buffers this rank's parts, as torch cuts them, of the whole tensors ``start``.

        Raises :class:`OtherModelError` for other names and shapes.
        """
        there: Left = {("param", fqn): one for fqn, one in self.named.items()}
        there |= {("buffer", fqn): one for fqn, one in self._buffers().items()}
        for (role, fqn), value in start.items():
            if (role, fqn) not in there:
                known = some([name for of, name in there if of == role])
                raise OtherModelError(f"the trainer's model has no {_WORDS[role]} {fqn}; it has {known or 'none'}")
            own = there[role, fqn]
            if own.shape != value.shape or own.dtype != value.dtype:
                raise OtherModelError(f"the trainer's {_WORDS[role]} {fqn} is {_kind(own)}, where the plan's is {_kind(value)}")
            with torch.no_grad():
                # torch cuts the whole tensor here. A part that was cut by our code would hide an error in how captured parts
                # are cut.
                local(own).copy_(_dealt(value, own))

    def take(self, batch: Any) -> Left:
        """Take one step on ``batch``, and say what it left: copies."""
        loss = self.trainer.backward(batch)
        # Copied before the update, which clips gradients in place.
        gradients = {fqn: local(one.grad).clone() for fqn, one in self.named.items() if one.grad is not None}
        if self._updates:
            self.trainer.update()
        else:
            self._update(gradients)
        for parameter in self.named.values():
            parameter.grad = None
        return (
            {("loss", ""): local(loss).clone()}
            | {("grad", fqn): one for fqn, one in gradients.items()}
            | self._tensors_and_state()
        )

    def refuse_other_rates(self, planned: Mapping[str, float], scheduled: Mapping[str, float]) -> None:
        """Raise OtherModelError for a rate that is neither ``planned`` nor ``scheduled``, what its schedule begins with.

        Of groups with a schedule, which :meth:`set_rates` gives the plan's rates: in others another rate shows by itself.
        """
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        for group, (name, rate) in zip(groups, rates(self.trainer.optimizers).items(), strict=True):
            if name not in scheduled or "lr" not in group:
                continue
            # A tensor of float32 may hold the trainer's.
            if not any(isclose(rate, one, rel_tol=1e-6) for one in (planned[name], scheduled[name])):
                raise OtherModelError(
                    f"the trainer's {name} is {rate:g}, where the plan's is {planned[name]:g}, and {scheduled[name]:g} as its "
                    "schedule begins"
                )

    def set_rates(self, scheduled: Mapping[str, float], factors: Mapping[str, float]) -> None:
        """Set groups' learning rates: to those ``scheduled``, others multiplied by ``factors``, by a graph's names."""
        for name in rates(self.trainer.optimizers):
            _, number, _, place, _ = name.split(".")
            group = self.trainer.optimizers[int(number)].param_groups[int(place)]
            if "lr" in group and name in scheduled:
                group["lr"] = scheduled[name]
            elif "lr" in group and name in factors:
                group["lr"] = group["lr"] * factors[name]  # not in place, since groups may share a tensor

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, Tensor]) -> None:
        """The update that bitwise applies to a step without an optimizer."""
        for fqn, gradient in gradients.items():
            part = local(self.named[fqn])
            part.add_(gradient.to(part.dtype), alpha=-LEARNING_RATE)

    def tensors(self) -> Left:
        """Parameters and buffers as they are: copies."""
        left: Left = {("param", fqn): local(one).clone() for fqn, one in self.named.items()}
        return left | {("buffer", fqn): local(one).clone() for fqn, one in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        model = self.trainer.model
        return {plain_fqn(fqn, model): one for fqn, one in model.named_buffers()}

    def _tensors_and_state(self) -> Left:
        states = state_tensors(self.trainer.optimizers, self.named)
        return self.tensors() | {("state", one.fqn): local(one.tensor).clone() for one in states}


_WORDS = {"param": "parameter", "buffer": "buffer"}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _dealt(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``whole``, cut as ``like`` is cut; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, without an autograd graph; a sparse tensor is made dense."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    part = part.to_dense() if part.is_sparse else part
    return part.detach()
