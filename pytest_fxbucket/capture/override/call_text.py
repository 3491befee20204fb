"""A call of an overridden module as the text that its node carries: what goes in, what comes out, what its tensors are like."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.factories import import_callable

Written = Any
"""A value as JSON holds it: plain values as they are, all others as a dict whose one key says their kind."""
_LOOKS = re.compile(r"(\w+)\[([\d, ]*)\](?:\{([\d, ]*)\})?")


@dataclass(frozen=True)
class ModuleCall:
    """One call: what it is given, what it gives, and where gradients go. Plain data."""

    state_names: tuple[str, ...]
    """Names, within the module, of the parameters, buffers and state that it reads, in the order of the node's argument."""
    arguments: Written
    """(args, kwargs), by :func:`written`."""
    gives: Written
    """The result, likewise."""
    promise: tuple[str, ...]
    """What each tensor in the result is like, by :func:`looks`."""
    asks: tuple[int, ...]
    """Numbers of the tensors that a gradient is asked for, held and then those given; none where gradients are off."""
    needed: tuple[int, ...] = ()
    """Numbers among asks for which backward must find a gradient; for the others it gives zeros where there is none."""

    def text(self) -> str:
        """All of it, in one line."""
        return json.dumps(asdict(self))

    def name_of(self, number: int) -> str:
        """For people: tensor ``number`` of held and then the tensors given."""
        return self.state_names[number] if number < len(self.state_names) else f"its input {number - len(self.state_names)}"

    def empty_results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as promised, on the device of the first of ``tensors``."""
        device = tensors[0].device if tensors else torch.device("cpu")
        likes = [_like(text) for text in self.promise]
        return [torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device=device) for like in likes]


@lru_cache(maxsize=10_000)
def call_of(text: str) -> ModuleCall:
    """The call that :meth:`ModuleCall.text` wrote."""
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
    return ModuleCall(**fields)


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
    if isinstance(value, dict) and is_dataclass(value) and "<locals>" not in type(value).__qualname__:
        # As models of transformers give: read by attribute, by key and by place.
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        return {name: [[key, written(item, tensors, where)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise CaptureError(
        f"{where} a value of type {type(value).__name__}; a module that is overridden takes and gives tensors, plain values, "
        "and tuples, lists, dicts and dicts that are dataclasses of them"
    )


def rebuilt(text: Written, tensors: Sequence[Any]) -> Any:
    """The value that :func:`written` wrote, with ``tensors`` in their places."""
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
    if ":" in kind:
        return import_callable(kind, "what an overridden module gives")(**{key: rebuilt(item, tensors) for key, item in inner})
    return getattr(torch, inner) if kind == "dtype" else torch.device(inner)


def shown(text: Written) -> str:
    """For people: ``tuple of 2``, ``tensor``, ``None``."""
    if not isinstance(text, dict):
        return repr(text)
    ((kind, inner),) = text.items()
    return f"{kind.partition(':')[2] or kind} of {len(inner)}" if isinstance(inner, list) else str(kind)


def looks(tensor: torch.Tensor) -> str:
    """``float32[4, 8]``; behind it ``{1, 4}``, the strides, of a tensor that is not contiguous."""
    name = str(tensor.dtype).removeprefix("torch.")
    shape = ", ".join(map(str, tensor.shape))
    strides = "" if tensor.is_contiguous() else f"{{{', '.join(map(str, tensor.stride()))}}}"
    return f"{name}[{shape}]{strides}"


def looks_so(tensor: torch.Tensor, text: str) -> bool:
    """Whether ``tensor`` is as ``text`` says; strides of dimensions of one element or none say nothing."""
    like = _like(text)
    if (tensor.dtype, tuple(tensor.shape)) != (like.dtype, like.shape):
        return False
    strides = zip(tensor.stride(), like.strides, like.shape, strict=True)
    return not tensor.numel() or all(a == b for a, b, size in strides if size > 1)


class _Like(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@lru_cache(maxsize=1_000)
def _like(text: str) -> _Like:
    found = _LOOKS.fullmatch(text)
    assert found is not None, text
    dtype, shape, strides = (
        found[1],
        *([int(number) for number in re.findall(r"\d+", part or "")] for part in found.groups()[1:]),
    )
    if found[3] is None:
        strides = [prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))]
    return _Like(getattr(torch, dtype), tuple(shape), tuple(strides))
