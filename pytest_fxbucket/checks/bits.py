"""Bits of tensors: as integers to compare, as distances, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from pytest_fxbucket.graph.portable import raw_bytes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {**_INTEGERS, 1: torch.int8}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of the same size, flat: signed zeros and NaNs differ as their bits do."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place; -1 where it has no meaning.

    That is for what is no float, if one is NaN where the other is not, and if nothing but NaNs is left to compare.
    """
    if not a.is_floating_point() or bool((a.isnan() != b.isnan()).any()):
        return -1
    numbers = ~a.isnan().reshape(-1)
    low, high = torch.aminmax(torch.stack([_ordered(a)[numbers], _ordered(b)[numbers]]), dim=0)
    if not low.numel():
        return -1
    apart = high - low
    wrapped = apart[apart < 0]  # float64 of opposite signs: more than int64 holds, and right modulo 2 ** 64
    return int(wrapped.max()) + (1 << 64) if wrapped.numel() else int(apart.max())


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, neighbours one apart; both zeros are 0."""
    raw = bits(tensor).view(_SIGNED[tensor.element_size()]).to(torch.int64)
    low = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(raw < 0, low - raw, raw)


def bits_digest(tensors: Sequence[torch.Tensor]) -> str:
    """Hex digest of shapes, dtypes and bits."""
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        text.update(raw_bytes(tensor))
    return text.hexdigest()
