"""Experts parted over ep: tokens travel to the rank of their expert and back, by two all-to-alls (GShard, arXiv 2006.16668)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import with_gradient
from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.compat.tracing import current_autograd_node
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group
from pytest_fxbucket.words import counted


def experts_forward(fqn: str, module: nn.Module, experts: int, group: Group, reads: ExpertReads) -> Callable[..., torch.Tensor]:
    """What is to be called instead of ``module.forward``, which computes with this rank's part of all ``experts``.

    It takes this rank's tokens by expert, (experts, capacity, ...), and gives what the experts made of them, in that order.
    ``reads`` is told when tokens are there.
    """
    own = experts // group.size
    whole = module.forward

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        values = (*given, *named.values())
        if len(values) != 1 or not isinstance(values[0], torch.Tensor):
            raise CaptureError(
                f"ep_plan parts {fqn}, which is called with {counted(len(values), 'argument')}; it must be given its tokens "
                f"alone, (experts = {experts}, capacity, ...): let the module around it send tokens to places of experts"
            )
        tokens = values[0]
        if tokens.dim() < 2 or tokens.shape[0] != experts:
            raise CaptureError(
                f"ep_plan parts {fqn}, whose parameters have {experts} rows, so its input must be (experts = {experts}, "
                f"capacity, ...), but has the shape {tuple(tokens.shape)}"
            )
        # Tokens go to the ranks of their experts. There the tokens of each expert lie one part for each sending rank. They are
        # put side by side, (own experts, ranks * capacity, ...), for the module, and apart again for the way back.
        there = _exchanged(tokens, group)
        by_rank = there.view(group.size, own, *tokens.shape[1:])
        with reads.allowed():
            made = whole(by_rank.transpose(0, 1).flatten(1, 2))
        back = made.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)
        return _exchanged(back, group)

    return forward


class ExpertReads:
    """Follows a trace: experts' parameters are read where tokens have travelled to them, and nowhere else."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """``modules`` has the module of each expert's parameter, by FQNs."""
        self._modules, self._depth = modules, 0

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """While inside, tokens are there."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def refuse(self, fqn: str) -> None:
        """Raise :class:`CaptureError` for a read of the parameter ``fqn`` of experts to which no tokens have travelled."""
        module = self._modules.get(fqn)
        # What a module computes again in backward it has read in forward.
        if module is not None and not self._depth and current_autograd_node() is None:
            raise CaptureError(
                f"ep_plan parts {module}, whose tokens travel where it is called, and {fqn} is read elsewhere, where a rank "
                "has some of its experts alone; call the module itself, and read its parameters in its forward"
            )


def count_of_experts(fqn: str, module: nn.Module) -> int:
    """Rows of each of ``module``'s parameters, one row an expert.

    Raises :class:`CaptureError` if parameters differ in them, or if a buffer has as many: it would not be parted.
    """
    rows = {name: parameter.shape[0] if parameter.dim() else 1 for name, parameter in module.named_parameters()}
    counts = set(rows.values())
    if len(counts) > 1:
        (a, m), (b, n) = next((x, y) for x in rows.items() for y in rows.items() if x[1] != y[1])
        raise CaptureError(
            f"ep_plan parts {fqn} by the first dimension of its parameters, one row an expert, but {a} has {m} rows and {b} {n}"
        )
    (count,) = counts
    if name := next((name for name, buffer in module.named_buffers() if buffer.dim() and buffer.shape[0] == count), ""):
        raise CaptureError(
            f"ep_plan parts {fqn} by the first dimension of its parameters, one row an expert, and its buffer {name} has "
            f"{count} rows, too, of which each rank has all; make it a parameter with requires_grad=False"
        )
    return count


def _exchanged(tokens: torch.Tensor, group: Group) -> torch.Tensor:
    """Rank i's j-th part of dimension 0 becomes rank j's i-th; so does its gradient."""
    splits = [tokens.shape[0] // group.size] * group.size

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return collective("all_to_all_single", x.contiguous(), splits, splits, group.name)

    return with_gradient(tokens, exchange, exchange)
