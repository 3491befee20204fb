"""Attention over parts of the sequence in eager steps, told by torch.distributed alone: nothing of the captured one is used.

Torch's own context parallelism has no attention for a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pytest_fxbucket.compat.modules import TorchFunctionMode


class WholeSequence(TorchFunctionMode):
    """While inside, ``scaled_dot_product_attention`` sees the keys and values of all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = self._attention if func is F.scaled_dot_product_attention else func
        return attend(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        keys, values = (_FromAll.apply(one, self._group) for one in (key, value))
        seen = None
        if is_causal:
            every = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
            seen = every.chunk(self._group.size())[self._group.rank()]
        return F.scaled_dot_product_attention(query, keys, values, seen, dropout_p, **more)


class _FromAll(torch.autograd.Function):
    """Each rank's part of dimension 2, in order of ranks; in backward the sum of what the ranks have of this one's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), 2)]
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, parts, group=ctx.group)
        return summed, None
