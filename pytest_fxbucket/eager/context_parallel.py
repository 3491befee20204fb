"""Attention over parts of the sequence in eager steps; it shares no code with the captured attention.

Keys and values are gathered by torch.distributed. If they go round a ring, it is torch's own ring attention, which is given
torch's kernel for a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pytest_fxbucket.compat.context_parallel import ring_attention, ring_attention_backward
from pytest_fxbucket.compat.modules import TorchFunctionMode

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class WholeSequence(TorchFunctionMode):
    """While inside, ``scaled_dot_product_attention`` sees the keys and values of all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, form: str = "all_gather") -> None:
        super().__init__()
        self._group, self._form = group, form

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
        if self._form == "ring":
            _refuse_in_blocks(query, key, value, dropout_p, bool(more.get("enable_gqa")))
            return _Ring.apply(  # type: ignore[no-any-return]  # a tensor
                query, key, value, self._group, is_causal, more.get("scale")
            )
        keys, values = (_FromAll.apply(one, self._group) for one in (key, value))
        seen = None
        if is_causal:
            # ``is_causal`` would set this rank's queries against the first keys of all: its rows of the whole mask are cut out.
            every = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
            seen = every.chunk(self._group.size())[self._group.rank()]
        return F.scaled_dot_product_attention(query, keys, values, seen, dropout_p, **more)


def _refuse_in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, enable_gqa: bool) -> None:
    """Raise ValueError for what torch's attention refuses, or its ring does not take: the kernel itself checks neither."""
    heads, shared = query.shape[1], key.shape[1]
    if shared not in (1, heads) and not enable_gqa:
        raise ValueError(
            f"scaled_dot_product_attention is given {heads} heads of queries and {shared} of keys, which takes enable_gqa=True"
        )
    if dropout_p or key.shape != value.shape or query.shape[0] != key.shape[0] or heads % shared:
        raise ValueError(
            "ring attention takes keys and values of one shape, of the queries' batch and of heads that divide theirs, and no "
            f"dropout_p, but is given {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} and {dropout_p}"
        )


class _Ring(torch.autograd.Function):
    """Torch's ring attention with a backward: torch itself offers it to its dispatcher, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
            shared = _shared_by(query, key)
            return _flash(query, _shared(key, shared), _shared(value, shared), 0.0, is_causal, scale=scale)

        out, logsumexp = ring_attention(kernel, query, key, value, group, is_causal)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
            shared = _shared_by(query, key)
            of_query, *others = _flash_backward(
                query=query, key=_shared(key, shared), value=_shared(value, shared), dropout_p=0.0, scale=ctx.scale, **more
            )
            return of_query, *(one.unflatten(1, (-1, shared)).sum(2) for one in others)

        found = ring_attention_backward(kernel, gradient, ctx.saved_tensors, ctx.group, ctx.is_causal)
        return *found, None, None, None


def _shared_by(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many heads of queries share one of keys and values."""
    return query.shape[1] // key.shape[1]


def _shared(few: torch.Tensor, times: int) -> torch.Tensor:
    return few.repeat_interleave(times, 1) if times > 1 else few


class _FromAll(torch.autograd.Function):
    """All ranks' parts of dimension 2, in order of ranks. Backward sums, over ranks, the gradients of this rank's part."""

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
