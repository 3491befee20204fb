"""Experts parted over ep: tokens travel to the rank of their expert and back, by two all-to-alls (GShard, arXiv 2006.16668)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.collectives import c10d_functional
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.mesh import Group


def experts_forward(fqn: str, module: nn.Module, experts: int, group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is to be called instead of ``module.forward``, which computes with this rank's part of all ``experts``.

    It takes this rank's tokens by expert, (experts, capacity, ...), and gives what the experts made of them, in that order.
    """
    own = experts // group.size
    whole = module.forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if tokens.dim() < 2 or tokens.shape[0] != experts:
            raise CaptureError(
                f"ep_plan parts {fqn}, whose parameters have {experts} rows, so its input must be (experts = {experts}, "
                f"capacity, ...), but has the shape {tuple(tokens.shape)}"
            )
        there = _Exchange.apply(tokens, group)  # type: ignore[no-untyped-call]
        by_rank = there.view(group.size, own, *tokens.shape[1:])
        made = whole(by_rank.transpose(0, 1).flatten(1, 2))
        back = made.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)
        out: torch.Tensor = _Exchange.apply(back, group)  # type: ignore[no-untyped-call]
        return out

    return forward


def count_of_experts(fqn: str, module: nn.Module) -> int:
    """Rows of all of ``module``'s parameters, one an expert. Raises :class:`CaptureError` if they differ."""
    rows = {name: parameter.shape[0] if parameter.dim() else 1 for name, parameter in module.named_parameters()}
    counts = set(rows.values())
    if len(counts) > 1:
        (a, m), (b, n) = next((x, y) for x in rows.items() for y in rows.items() if x[1] != y[1])
        raise CaptureError(
            f"ep_plan parts {fqn} by the first dimension of its parameters, one row an expert, but {a} has {m} rows and {b} {n}"
        )
    return counts.pop()


class _Exchange(torch.autograd.Function):
    """Rank i's j-th part of dimension 0 becomes rank j's i-th; so does its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(x: torch.Tensor, group: Group) -> torch.Tensor:
    c10d = c10d_functional()
    splits = [x.shape[0] // group.size] * group.size
    arrived: torch.Tensor = c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), splits, splits, group.name))
    return arrived
