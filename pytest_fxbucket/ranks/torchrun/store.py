"""Values of any size in torchrun's TCPStore: JSON and the bytes of tensors, of which nothing can run.

Whoever reaches torchrun's store can write there, so what is read is taken for data, never for code: JSON's own scalars stand
for themselves, and all else is a list that begins with what it is. Of classes only this package's own dataclasses come back,
field by field, without a call of theirs.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.torchrun.member import Member
from pytest_fxbucket.ranks.wire import line_of

if TYPE_CHECKING:
    import torch

_OURS = __name__.partition(".")[0]
_SCALARS = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlainDataError(Exception):
    """A value that cannot be sent; the text says what in it is no plain data."""


class RefusedDataError(RankError):
    """Something that was received and is no plain data."""


def pack(value: object) -> list[wire.Buffer]:
    """JSON (UTF-8) of ``value``, and the buffers that it counts. Raises NotPlainDataError."""
    buffers: list[wire.Buffer] = []
    try:
        text = json.dumps(_plain(value, buffers), separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # a number of too many digits, a list within itself
        raise NotPlainDataError(line_of(error)) from error
    return [text.encode(), *buffers]


def unpack(buffers: Sequence[wire.Buffer]) -> object:
    """The value behind ``pack``; tensors own the received memory. Raises RefusedDataError."""
    try:
        return _value(json.loads(bytes(buffers[0])), buffers[1:])
    except Exception as error:
        raise RefusedDataError(
            f"what came over the network is no plain data of ours, and was refused ({line_of(error)})"
        ) from error


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
    if wire.is_plain_tensor(value) and not vars(value):
        _, (buffer, *rest) = wire.reduce_tensor(value)
        buffers.append(buffer.raw())
        return ["tensor", len(buffers) - 1, *rest]
    if dataclasses.is_dataclass(value) and kind.__module__.partition(".")[0] == _OURS:
        fields = [_plain(getattr(value, field.name), buffers) for field in dataclasses.fields(value)]
        return ["ours", f"{kind.__module__}:{kind.__qualname__}", *fields]
    raise NotPlainDataError(f"a {kind.__module__}.{kind.__qualname__}")


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
        # By vars, which calls no __getattr__.
        found = vars(found)[part]
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or found.__module__ != module:
        _no(f"class {name}")
    made = object.__new__(found)
    for field, value in zip(dataclasses.fields(found), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _no(what: str) -> NoReturn:
    raise ValueError(f"{what} is not known here")


# Values of any size in a TCPStore, whose own values end at 8 MiB, and torch's errors as ours.


_PART_BYTES = 4 << 20
# Only keys that were seen are asked for, and those are there at once: the time is for a server that is slow or gone.
_ANSWER_S = 60
LIMIT_S = 90.0
"""The limit for any answer of the store, since torch has one for few of them."""
_BACKLOG = 1024


_T = TypeVar("_T")
_Asked: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class StoreLost(RankError):
    """The store does not answer any more."""


class Store:
    """A store that all members see; its keys are this run's own. Every method raises StoreLost when the store is gone."""

    def __init__(self, member: Member, *, is_server: bool = False) -> None:
        self._where = f"{member.host}:{member.port}"
        self._lost = ""
        self._asked: _Asked = SimpleQueue()
        self.prefix = f"fxbucket/{member.run}"
        # Calls run on a daemon thread, since one that does not return must not keep this process from ending.
        threading.Thread(target=_answer, args=(self._asked,), daemon=True).start()
        weakref.finalize(self, self._asked.put, None)
        self._store = self._ask(lambda: _connected(member, self.prefix, is_server))

    def put(self, key: str, value: object) -> None:
        """Let ``key`` have a value of plain data; it is seen whole or not at all. Raises NotPlainDataError."""
        buffers = pack(value)
        data = b"".join([wire.head(buffers), *buffers])
        # The key has the number of further parts, and the first part. It is set last, so whoever finds it finds all parts.
        starts = range(_PART_BYTES, len(data), _PART_BYTES)
        for index, start in enumerate(starts):
            self._set(f"{key}/part{index}", data[start : start + _PART_BYTES])
        self._set(key, wire.HEAD.pack(wire.BEGIN, len(starts)) + data[:_PART_BYTES])

    def get(self, key: str) -> object:
        """The value that somebody has put at ``key``. Raises RefusedDataError for what is no plain data."""
        first = self._get(key)
        data = bytearray(first[wire.HEAD.size :])
        for index in range(_parts(first)):
            data += self._get(f"{key}/part{index}")
        return unpack(_split(data))

    def has(self, *keys: str) -> bool:
        """Whether all ``keys`` have values."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def forget(self, key: str) -> None:
        """Give the memory of a value back, if there is any."""
        if self.has(key):
            parts = range(_parts(self._get(key)))
            self.drop(key, *(f"{key}/part{index}" for index in parts))

    def drop(self, *keys: str) -> None:
        """Forget notes and counters."""
        self._ask(lambda: [self._store.delete_key(key) for key in keys])

    def note(self, key: str, text: str) -> None:
        """Let ``key`` have a text; later texts replace it."""
        self._set(key, text.encode("utf-8", "backslashreplace"))  # a name of a file need be no text

    def notes(self, keys: Sequence[str]) -> list[str]:
        """The texts of ``keys``, which must be there."""
        texts = self._ask(lambda: self._store.multi_get(list(keys))) if keys else []
        return [bytes(text).decode("utf-8", "replace") for text in texts]

    def count(self, key: str, more: int = 0) -> int:
        """Add to the counter ``key``; its value."""
        return int(self._ask(lambda: self._store.add(key, more)))

    def _get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # takes bytes, though torch's stub says text

    def _ask(self, call: Callable[[], _T]) -> _T:
        # What is lost stays lost: the thread may still be in the call that did not return.
        future: Future[_T] = Future()
        if not self._lost:
            self._asked.put((future, call))
        try:
            if not self._lost:
                return future.result(LIMIT_S)
        except TimeoutError:
            self._lost = f"not within {LIMIT_S:g} s"
        except RuntimeError as error:  # torch.distributed.DistError, whose kind differs from torch to torch
            self._lost = str(error).strip().partition("\n")[0]
        why = f"torchrun's store at {self._where} does not answer ({self._lost})"
        raise StoreLost(f"{why}: the node that serves it is gone, or stands still")


def _answer(asked: _Asked) -> None:
    while one := asked.get():
        future, call = one
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del one, future, call  # which keep the store


def _connected(member: Member, prefix: str, is_server: bool) -> c10d.Store:
    store = c10d.TCPStore(
        member.host,
        member.port,
        is_master=is_server,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=_ANSWER_S),
        master_listen_fd=_listen(member) if is_server else None,
    )
    return c10d.PrefixStore(prefix, store)


def _listen(member: Member) -> int | None:
    """A socket that listens where others look for the store, and there alone; None if that is no address of this machine."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((socket.gethostbyname(member.host), member.port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener.detach()


def _parts(first: bytes) -> int:
    """How many further parts the value has whose key holds ``first``."""
    begin, parts = wire.HEAD.unpack_from(first) if len(first) >= wire.HEAD.size else (b"", 0)
    return int(parts) if begin == wire.BEGIN else 0


def _split(data: bytearray) -> list[wire.Buffer]:
    """The buffers of the frame ``data``, which own their memory; ``data`` itself if it is no frame."""
    start, parts = 0, wire.frame(len(data))
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            buffers: list[wire.Buffer] = end.value
            return buffers
        except (wire.GarbledFrameError, struct.error):
            return [data]
        part[:] = data[start : start + len(part)]
        start += len(part)
