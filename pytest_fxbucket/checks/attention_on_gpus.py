"""CUDA kernels for the attention operators of graphs that were traced on the CPU: torch has only CPU kernels for them.

They compute the same formula with plain operators, after T. Dao et al., FlashAttention (arXiv 2205.14135), section 3 and
appendix B, without its tiles. Sums are in float32, or in float64 for float64 tensors. They are slow and take much memory: they
are for values, not for step time.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_ATEN = torch.ops.aten
OPERATORS = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Operators that have a CUDA kernel once :func:`register` was called."""
_HEADS = 1
_libraries: list[torch.library.Library] = []
"""Kept alive, since the kernels that a library registered go with it."""


@cache
def register() -> None:
    """Give OPERATORS kernels for CUDA, for all of this process."""
    library = torch.library.Library("aten", "IMPL")
    for operator, kernel in zip(OPERATORS, (attend, attend_backward), strict=True):
        library.impl(operator, kernel, "CUDA")
    _libraries.append(library)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, (batch, heads, queries, head_dim) of ``query``'s dtype, and the logsumexp of its scores.

    The logsumexp is (batch, heads, queries), of float32 or float64. Both are 0 for a row that is masked as a whole. Keys and
    values may have fewer heads: neighbouring heads of queries share one.
    """
    # ``dropout_p`` is not read: torch's kernel for the CPU, with which the graph was traced, refuses any but 0.
    key, value = (_for_heads_of(query, one) for one in (key, value))
    scores = _scores(query, key, is_causal, attn_mask, scale)
    logsumexp = scores.logsumexp(-1)
    # In a row that is masked as a whole all scores are -inf: less -inf they would give NaN, less 0 they give weights of 0.
    logsumexp = logsumexp.masked_fill(logsumexp.isneginf(), 0)
    out = (_weights(scores, logsumexp) @ value.to(scores.dtype)).to(query.dtype)
    return _by_sequence(out), _by_sequence(logsumexp)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; ``out`` and ``logsumexp`` may be of attention over more keys than ``key`` has."""
    # The weights are made again from the scores and the logsumexp. The gradient of a score is its weight times how far the
    # gradient of that weight lies above the row's weighted mean of them, which is the sum of gradient times ``out``.
    own = key.shape[_HEADS]
    key, value = (_for_heads_of(query, one) for one in (key, value))
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = _weights(scores, logsumexp.to(scores.dtype))
    wide = gradient.to(scores.dtype)
    of_value = weights.mT @ wide
    shared = (wide * out.to(scores.dtype)).sum(-1, keepdim=True)
    of_scores = weights * (wide @ value.to(scores.dtype).mT - shared) * _scale(query, scale)
    of_key = of_scores.mT @ query.to(scores.dtype)
    # Heads of queries that share a head of keys and values lie side by side: their gradients are added.
    found = (of_scores @ key.to(scores.dtype), *(one.unflatten(_HEADS, (own, -1)).sum(2) for one in (of_key, of_value)))
    of_query, of_key, of_value = (_by_sequence(one.to(query.dtype)) for one in found)
    return of_query, of_key, of_value


def _for_heads_of(query: Tensor, few: Tensor) -> Tensor:
    return few.repeat_interleave(query.shape[_HEADS] // few.shape[_HEADS], _HEADS)


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT * _scale(query, scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1), -torch.inf)
    return scores if mask is None else scores + mask.to(dtype)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    return (scores - logsumexp.unsqueeze(-1)).exp()


def _by_sequence(tensor: Tensor) -> Tensor:
    """``tensor`` with the strides that the CPU's kernel gives, which the traced graph relies on: sequence before heads."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
