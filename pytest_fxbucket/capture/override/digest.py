"""A number for what a call gives, by which a later call is known to give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_CHUNK = 1 << 18
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # as signed numbers of 64 bits


def digest_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """An int64 of shape () on the device of the first of ``tensors``, made of all bits, each where it lies in its tensor.

    Each 8 bytes are mixed with their place by the steps of SplitMix64 (G. Steele et al., OOPSLA 2014), and added up. Needs
    memory for a few chunks of 2 MiB at most, and does not wait for the device.
    """
    total = fake_digest(tensors).zero_()
    with torch.no_grad():
        for tensor in tensors:
            for start, words in _words(tensor):
                places = torch.arange(start + 1, start + 1 + len(words), device=words.device).mul_(_ODD[0])
                total = total * _ODD[1] + _mixed(words.add_(places)).sum().to(total.device)
    return total


def fake_digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What :func:`digest_of` gives looks like."""
    return torch.empty((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """In place."""
    words.bitwise_xor_(words >> 30).mul_(_ODD[1])
    words.bitwise_xor_(words >> 27).mul_(_ODD[2])
    return words.bitwise_xor_(words >> 31)


def _words(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(a number of its own, words) of each chunk of ``tensor``, as int64, zeros behind the last byte."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        yield start, _as_words(flat[start : start + _CHUNK])


def _as_words(part: torch.Tensor) -> torch.Tensor:
    size = part.numel() * part.element_size()
    words = torch.zeros(-(-size // 8), dtype=torch.int64, device=part.device)
    words.view(torch.uint8)[:size].copy_(part.contiguous().view(torch.uint8))
    return words
