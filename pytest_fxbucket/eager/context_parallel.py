"""Attention over parts of the sequence in eager steps, told by torch.distributed alone: nothing of the captured one is used.

Torch's own context parallelism has no attention for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode
from pytest_fxbucket.compat.modules import TorchFunctionMode

_SAME = 1e-4
"""How far values of parts may lie from those of wholes, as a share of the largest: sums in float32, in another order."""


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


def other_than_whole(call: Callable[[Any], Any], whole: Any, part: Any, group: dist.ProcessGroup) -> str:
    """What a model that ``call`` calls gives otherwise of ``part``, this rank's of each sequence of ``whole``; empty: nothing.

    Nothing is said of a model that computes in 16 bits, whose rounding would hide it.
    """
    with torch.no_grad(), _Coarsest() as seen:
        with WholeSequence(group):
            parts = _tensors(call(part))
        wholes = _tensors(call(whole))
    if seen.is_half:
        return ""
    for number, (own, all_of_it) in enumerate(zip(parts, wholes, strict=True)):
        if own.dim() < 2 or own.shape[1] * group.size() != all_of_it.shape[1]:
            continue
        off = (own - all_of_it.chunk(group.size(), 1)[group.rank()]).abs().amax([at for at in range(own.dim()) if at != 1])
        if bool((wrong := off > _SAME * all_of_it.abs().max()).any()):
            which = f" of output {number}" if len(parts) > 1 else ""
            return (
                "of a part of the sequence the model gives other values than of the whole, by "
                f"{float(off.max() / all_of_it.abs().max()):.1%} of the largest, first at place {int(wrong.nonzero()[0])} of a "
                f"part{which}; if it counts positions by itself, let the batch give them: cp cuts them as it cuts tokens"
            )
    return ""


def _tensors(output: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one.is_floating_point()]


class _Coarsest(TorchDispatchMode):
    """Whether anything is computed in 16 bits while inside."""

    is_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.is_half |= any(one.itemsize == 2 for one in _tensors(result))
        return result
