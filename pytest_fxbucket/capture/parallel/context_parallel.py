"""Attention of a rank's part of the sequence to all of it: keys and values are gathered over cp (Llama 3, arXiv 2407.21783),
or go round its ranks (:mod:`pytest_fxbucket.capture.parallel.ring_attention`).

Everything else of a model computes token by token, so its batch is cut along the sequence and no other communication is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pytest_fxbucket.capture.parallel.ring_attention import HEADS, RingAttention
from pytest_fxbucket.capture.parallel.sequence_parallel import gathered_sequence
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.modules import TorchFunctionMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group, Mesh

_SEQUENCE = 2
"""Dimension of queries, keys and values, (batch, heads, sequence, head_dim)."""
_attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
_OTHERS = (F.multi_head_attention_forward,)
"""Functions that call attention below what a ``TorchFunctionMode`` sees."""


class AttentionToAll(TorchFunctionMode):
    """While inside, ``scaled_dot_product_attention`` of parts of the sequence attends to the parts of all of ``group``.

    ``place`` is this rank's index along it, ``form`` that of ``cp_form``. Raises :class:`CaptureError` for attention that
    cannot be parted.
    """

    def __init__(self, group: Group, place: torch.Tensor, form: str) -> None:
        super().__init__()
        self._group, self._place, self._form = group, place, form
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OTHERS:
            raise CaptureError(
                "cp parts the sequence, and torch.nn.MultiheadAttention has attention of its own, which would see a rank's "
                "part alone; call torch.nn.functional.scaled_dot_product_attention"
            )
        if func is not _attend:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attention(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise CaptureError(
                f"cp parts the sequence, but scaled_dot_product_attention is given a mask of shape {tuple(attn_mask.shape)}, "
                "which is of a rank's part alone; use is_causal = True, or no mask"
            )
        if query.dim() != 4 or query.shape[_SEQUENCE] != key.shape[_SEQUENCE]:
            raise CaptureError(
                "cp parts the sequence of queries and keys alike, each (batch, heads, sequence, head_dim), but "
                f"scaled_dot_product_attention is given {tuple(query.shape)} and {tuple(key.shape)}"
            )
        if self._form == "ring":
            _refuse_in_blocks(query, key, value, dropout_p, bool(more.get("enable_gqa")))
            return RingAttention.apply(  # type: ignore[no-any-return]  # a tensor
                query, key, value, self._group, self._place, is_causal, more.get("scale")
            )
        # A key is attended to by queries of all ranks, so its gradient is the sum of theirs: reduced and scattered, hence no
        # place.
        key, value = (gathered_sequence(one, self._group, None, _SEQUENCE) for one in (key, value))
        # ``is_causal`` of the kernel would take this rank's first query for the first token of the whole sequence.
        mask = causal(query.shape[_SEQUENCE], key.shape[_SEQUENCE], self._place, query.device) if is_causal else None
        return _attend(query, key, value, mask, dropout_p, **more)

    def refuse_unused(self) -> None:
        """Raise :class:`CaptureError` for a model that never attended, so that no token saw the tokens of other ranks."""
        if not self.calls:
            raise CaptureError(
                "cp parts the sequence, but the model never calls torch.nn.functional.scaled_dot_product_attention, so no "
                "token would see those of other ranks; attend by it, or leave cp out"
            )


def _refuse_in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, enable_gqa: bool) -> None:
    """Raise :class:`CaptureError` for attention that has no kernel which gives its logsumexp, by which blocks are merged.

    The kernel does not check shapes: with others than these it reads beyond the end of a tensor, or crashes.
    """
    way_out = 'use cp_form = "all_gather"'
    if dropout_p:
        raise CaptureError(
            f"cp_form ring attends block by block, which has no dropout, but dropout_p is {dropout_p}; {way_out}"
        )
    heads, shared = query.shape[HEADS], key.shape[HEADS]
    if key.shape[:-1] != value.shape[:-1] or query.shape[0] != key.shape[0] or heads % shared:
        raise CaptureError(
            "cp_form ring takes keys and values of as many heads, which divide those of queries, and of their batch, but "
            f"scaled_dot_product_attention is given {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; {way_out}"
        )
    if shared not in (1, heads) and not enable_gqa:  # one head is broadcast
        raise CaptureError(
            f"scaled_dot_product_attention is given {heads} heads of queries and {shared} of keys and values, which queries "
            "share with enable_gqa=True alone; give it that, in a ring as without cp"
        )
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise CaptureError(
            "cp_form ring attends by torch's flash kernel, whose queries, keys and values have one head_dim, but "
            f"scaled_dot_product_attention is given {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}; {way_out}"
        )


def causal(queries: int, keys: int, place: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Which keys each query of part number ``place`` sees: those that do not lie behind it in the whole sequence."""
    own = place * queries + torch.arange(queries, device=device)
    return torch.arange(keys, device=device) <= own[:, None]


def cut_sequences(batch: Any, mesh: Mesh, rank: int) -> Any:
    """The part of ``batch`` that ``rank`` gets: of each tensor its part of dimension 1; all of a tensor with fewer dimensions.

    Raises :class:`CaptureError` for a sequence that cp does not divide.
    """
    degree = mesh.degree("cp")
    if degree == 1:
        return batch

    def part(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        if tensor.shape[1] % degree:
            raise CaptureError(
                f"cp = {degree} does not divide dimension 1 of {path or 'the batch'}, whose shape is {tuple(tensor.shape)}; "
                "give sequences of another length, or use another cp"
            )
        return tensor.chunk(degree, 1)[mesh.at(rank, "cp")].contiguous()

    paths, spec = pytree.tree_flatten_with_path(batch)
    leaves = [part(pytree.keystr(path), leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in paths]
    return pytree.tree_unflatten(leaves, spec)
