"""All values that cross between two stages as one tensor, for engines that send one tensor or run backward for each tensor.

The tensor has the bytes of each value as they are, each behind a head that says what is not known before: whether the value is
there, whether it requires grad, its strides. The tensor's gradient has the gradients of the values in the same form, and says
which are None. So both sides compute what they would compute in one process, bit for bit. Nobody may do arithmetic with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.pipeline.stages import Stage
from pytest_fxbucket.step.pipelined import Crossing

_ABSENT, _PLAIN, _WITH_GRAD = range(3)
_ALIGNED = 8
"""Heads and values begin at multiples of so many bytes: the widest part of a dtype, and a number of the head, has 8."""


class Carrier:
    """Makes the tensor for ``crossings``, of ``shape`` (elements, then ones) and ``dtype``, which must be floating."""

    def __init__(self, crossings: Sequence[Crossing], dtype: torch.dtype = torch.float32, dims: int = 1) -> None:
        self.crossings, self.dtype = tuple(crossings), dtype
        self._heads = [_ALIGNED * (1 + len(one.shape)) for one in self.crossings]
        self._bodies = [math.ceil(one.bytes / _ALIGNED) * _ALIGNED for one in self.crossings]
        elements = max(sum(self._heads) + sum(self._bodies), _ALIGNED) // dtype.itemsize
        self.shape = (elements, *[1] * (dims - 1))

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor of ``values``; it requires grad if one of them does."""
        packed: torch.Tensor = _Pack.apply(self, *values)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values, with the strides that they had; gradients of those that required grad are the gradient of ``packed``."""
        values: tuple[torch.Tensor, ...] = _Unpack.apply(self, packed)
        return values

    def written(self, values: Sequence[torch.Tensor | None], with_grad: Sequence[bool]) -> torch.Tensor:
        """The bytes of ``values``, some of which may be None."""
        device = next((value.device for value in values if value is not None), None)
        # A head that stays zero says that its value is absent.
        whole = torch.zeros(self.shape, dtype=self.dtype, device=device)
        made = whole.view(-1).view(torch.uint8)
        at = 0
        for value, grad, head, body in zip(values, with_grad, self._heads, self._bodies, strict=True):
            if value is not None:
                numbers = torch.tensor([_WITH_GRAD if grad else _PLAIN, *value.stride()])
                made[at : at + head] = numbers.view(torch.uint8).to(made.device)
                # Conjugate and negative views are flags that bytes do not show.
                own = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
                made[at + head : at + head + own.numel()] = own
            at += head + body
        return whole

    def read(self, packed: torch.Tensor) -> list[tuple[torch.Tensor, bool] | None]:
        """Each value, and whether it required grad."""
        given = packed.detach().contiguous().view(-1).view(torch.uint8)
        found: list[tuple[torch.Tensor, bool] | None] = []
        at = 0
        for one, head, body in zip(self.crossings, self._heads, self._bodies, strict=True):
            flag, *strides = given[at : at + head].view(torch.int64).tolist()
            if flag == _ABSENT:
                found.append(None)
            else:
                whole = given[at + head : at + head + one.bytes].clone().view(one.dtype).view(one.shape)
                found.append((_with_strides(whole, strides), flag == _WITH_GRAD))
            at += head + body
        return found


def _with_strides(whole: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """``whole``, which is contiguous, in memory of other strides."""
    if tuple(strides) == whole.stride():
        return whole
    made = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device)
    # An expanded dimension (stride 0) is one element in memory: torch refuses to copy into it as a whole.
    once = tuple(slice(None) if stride else slice(1) for stride in strides)
    made[once].copy_(whole[once])
    return made


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Carrier, *values: torch.Tensor) -> torch.Tensor:
        ctx.carrier = carrier
        return carrier.written(values, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(read and read[0] for read in ctx.carrier.read(grads[0]))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Carrier, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.carrier = carrier
        ctx.set_materialize_grads(False)  # a gradient that is None is sent back as None, not as zeros
        found = [read for read in carrier.read(packed) if read is not None]
        ctx.mark_non_differentiable(*(value for value, with_grad in found if not with_grad))
        return tuple(value for value, _ in found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor]:
        return None, ctx.carrier.written(grads, [False] * len(grads))


class CarriedStage(nn.Module):
    """A stage that takes and gives carriers; the first takes the tensors of the batch, the last gives what the model gives."""

    def __init__(self, stage: Stage, dtype: torch.dtype = torch.float32, dims: int = 1) -> None:
        super().__init__()
        self.stage = stage
        said = stage.summary
        self.received = Carrier(said.receives, dtype, dims) if said.index else None
        self.sent = Carrier(said.sends, dtype, dims) if not stage.is_last else None

    def forward(self, *received: torch.Tensor) -> Any:
        """Take a carrier, or on the first stage what the stage receives; give a carrier, or the model's result."""
        values = received if self.received is None else self.received.unpack(*received)
        given = self.stage(*values)
        return given if self.sent is None else self.sent.pack(given)
