"""Values that go over the network: plain data as JSON with the bytes of tensors beside it, of which nothing can run.

Whoever reaches torchrun's store can write there, so what is read is taken for data, never for code: JSON's own scalars stand
for themselves, and all else is a list that begins with what it is. Of classes only this package's own dataclasses come back,
field by field, without a call of theirs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.words import line_of

if TYPE_CHECKING:
    import torch

_OURS = __name__.partition(".")[0]
_SCALARS = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlain(Exception):
    """A value that cannot be sent; the text says what it has that is no plain data."""


class Refused(RankError):
    """Something that was received and is no plain data."""


def pack(value: object) -> list[wire.Buffer]:
    """JSON (UTF-8) of `value`, and the buffers that it counts. Raises NotPlain."""
    buffers: list[wire.Buffer] = []
    try:
        text = json.dumps(_plain(value, buffers), separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # a number of too many digits, a list within itself
        raise NotPlain(line_of(error)) from error
    return [text.encode(), *buffers]


def unpack(buffers: Sequence[wire.Buffer]) -> object:
    """The value behind `pack`; tensors own the received memory. Raises Refused."""
    try:
        return _value(json.loads(bytes(buffers[0])), buffers[1:])
    except Exception as error:
        raise Refused(f"what came over the network is no plain data of ours, and was refused ({line_of(error)})") from error


def _plain(value: Any, buffers: list[wire.Buffer]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in _CONTAINERS.values():
        return [type(value).__name__, *(_plain(one, buffers) for one in value)]
    if kind is dict:
        return ["dict", *([_plain(key, buffers), _plain(one, buffers)] for key, one in value.items())]
    if kind in (bytes, bytearray):
        buffers.append(value)
        return ["bytes", len(buffers) - 1]
    if wire.is_plain_tensor(value):
        _, (buffer, *rest) = wire.reduce_tensor(value)
        buffers.append(buffer.raw())
        return ["tensor", len(buffers) - 1, *rest]
    if dataclasses.is_dataclass(value) and kind.__module__.partition(".")[0] == _OURS:
        fields = [_plain(getattr(value, field.name), buffers) for field in dataclasses.fields(value)]
        return ["ours", f"{kind.__module__}:{kind.__qualname__}", *fields]
    raise NotPlain(f"a {kind.__module__}.{kind.__qualname__}")


def _value(plain: Any, buffers: Sequence[wire.Buffer]) -> Any:
    if not isinstance(plain, list):
        return plain if not isinstance(plain, dict) else _no("an object")
    kind, *rest = plain
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]([_value(one, buffers) for one in rest])
    match kind:
        case "dict":
            return {_value(key, buffers): _value(one, buffers) for key, one in rest}
        case "bytes":
            return bytes(buffers[rest[0]])
        case "tensor":
            return _tensor(buffers[rest[0]], *rest[1:])
        case "ours":
            return _ours(rest[0], [_value(one, buffers) for one in rest[1:]])
    _no(f"kind {kind!r}")


def _tensor(
    data: wire.Buffer, dtype: str, shape: list[int], stride: list[int], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype) or len(data) != math.prod(shape) * kind.itemsize:
        _no(f"a tensor of {len(data)} bytes")
    return wire.rebuild_tensor(bytearray(data), dtype, tuple(shape), tuple(stride), requires_grad, is_parameter)


def _ours(name: str, values: list[Any]) -> object:
    """The dataclass of this package, as it was: nothing of it is called."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module) if module.startswith(f"{_OURS}.") else _no(f"class {name}")
    for part in path.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or found.__module__ != module:
        _no(f"class {name}")
    made = object.__new__(found)
    for field, value in zip(dataclasses.fields(found), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _no(what: str) -> NoReturn:
    raise ValueError(f"{what} is not known here")
