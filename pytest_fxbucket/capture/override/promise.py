"""What the tensors that a call gives look like: written down when the step is traced, held to when it runs."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import torch

_TEXT = re.compile(r"(\w+)\[([\d, ]*)\](?:\{([\d, ]*)\})?")


class Promise(NamedTuple):
    """Of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def promise_text(tensor: torch.Tensor) -> str:
    """``float32[4, 8]``; behind it ``{1, 4}``, the strides, of a tensor that is not contiguous."""
    name = str(tensor.dtype).removeprefix("torch.")
    shape = ", ".join(map(str, tensor.shape))
    strides = "" if tensor.is_contiguous() else f"{{{', '.join(map(str, tensor.stride()))}}}"
    return f"{name}[{shape}]{strides}"


@lru_cache(maxsize=1_000)
def promised(text: str) -> Promise:
    """What :func:`promise_text` wrote."""
    found = _TEXT.fullmatch(text)
    assert found is not None, text
    shape = _numbers(found[2])
    return Promise(getattr(torch, found[1]), shape, _numbers(found[3]) if found[3] is not None else _contiguous(shape))


def keeps(tensor: torch.Tensor, text: str) -> bool:
    """Whether ``tensor`` is as ``text`` says; strides of dimensions of one element or none say nothing."""
    wanted = promised(text)
    if (tensor.dtype, tuple(tensor.shape)) != (wanted.dtype, wanted.shape):
        return False
    if not tensor.numel():
        return True
    return all(a == b for a, b, size in zip(tensor.stride(), wanted.strides, wanted.shape, strict=True) if size > 1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
