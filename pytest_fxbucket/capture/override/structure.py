"""Arguments and results of a call as text and tensors: plain values and containers are written down, tensors numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_fxbucket.errors import CaptureError

Written = Any
"""What JSON can hold: plain values as they are, all else a dict of one key that says what it is."""


def written(value: Any, tensors: list[torch.Tensor], where: str) -> Written:
    """``value`` as JSON can hold it; its tensors are added to ``tensors``, and stand by their numbers.

    Raises :class:`CaptureError`, beginning with ``where``, for a leaf that is neither a tensor nor a plain value.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [written(item, tensors, where) for item in value]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, written(item, tensors, where)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise CaptureError(
        f"{where} a value of type {type(value).__name__}; a module that is overridden takes and gives tensors, plain values, "
        "and "
        "tuples, lists and dicts of them"
    )


def rebuilt(text: Written, tensors: Sequence[Any]) -> Any:
    """The value again, with ``tensors`` in their places."""
    if not isinstance(text, dict):
        return text
    ((kind, inner),) = text.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("tuple", "list"):
        items = [rebuilt(item, tensors) for item in inner]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: rebuilt(item, tensors) for key, item in inner}
    return getattr(torch, inner) if kind == "dtype" else torch.device(inner)


def shown(text: Written) -> str:
    """For people: ``tuple of 2``, ``tensor``, ``None``."""
    if not isinstance(text, dict):
        return repr(text)
    ((kind, inner),) = text.items()
    return f"{kind} of {len(inner)}" if isinstance(inner, list) else str(kind)
