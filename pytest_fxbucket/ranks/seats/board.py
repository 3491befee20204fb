"""Values of any size in a TCPStore, whose own values end at 8 MiB, and torch's errors as ours."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.seats.member import Member

_PART_BYTES = 4 << 20
_PARTS = struct.Struct("<I")
# A key that was seen is there at once; the time is for a server that is slow or gone.
_ANSWER_S = 60


class StoreLost(RankError):
    """The store does not answer any more."""


class Board:
    """A store that all members see; its keys are this run's own."""

    def __init__(self, member: Member, *, is_server: bool = False) -> None:
        self._where = f"{member.host}:{member.port}"
        self.prefix = f"fxbucket/{member.run}"
        with self._answering():
            self._store = c10d.PrefixStore(
                self.prefix,
                c10d.TCPStore(
                    member.host,
                    member.port,
                    is_master=is_server,
                    wait_for_workers=False,
                    multi_tenant=True,
                    timeout=timedelta(seconds=_ANSWER_S),
                ),
            )

    def put(self, key: str, value: object) -> None:
        """Let `key` have a value, pickled; it is seen whole or not at all. Raises Unpicklable."""
        buffers = wire.pack(value)
        data = memoryview(b"".join([wire.head(buffers), *buffers]))
        rest = [data[start : start + _PART_BYTES] for start in range(_PART_BYTES, len(data), _PART_BYTES)]
        with self._answering():
            for index, part in enumerate(rest):
                self._set(f"{key}/part{index}", bytes(part))
            self._set(key, _PARTS.pack(len(rest)) + data[:_PART_BYTES])

    def get(self, key: str) -> object:
        """The value that somebody has put at `key`. Raises Unpicklable."""
        with self._answering():
            first = self._store.get(key)
            (parts,) = _PARTS.unpack_from(first)
            data = bytearray(first[_PARTS.size :])
            for index in range(parts):
                data += self._store.get(f"{key}/part{index}")
        return wire.unpack(_split(data))

    def has(self, *keys: str) -> bool:
        """Whether all `keys` have values."""
        with self._answering():
            return bool(self._store.check(list(keys)))

    def forget(self, key: str) -> None:
        """Give the memory of a value back, if there is any."""
        with self._answering():
            if not self._store.check([key]):
                return
            (parts,) = _PARTS.unpack_from(self._store.get(key))
            for name in (key, *(f"{key}/part{index}" for index in range(parts))):
                self._store.delete_key(name)

    def drop(self, *keys: str) -> None:
        """Forget notes and counters."""
        with self._answering():
            for key in keys:
                self._store.delete_key(key)

    def note(self, key: str, text: str) -> None:
        """Let `key` have a text; later texts replace it."""
        with self._answering():
            self._store.set(key, text)

    def notes(self, keys: Sequence[str]) -> list[str]:
        """The texts of `keys`, which must be there."""
        with self._answering():
            return [bytes(text).decode("utf-8", "replace") for text in self._store.multi_get(list(keys))] if keys else []

    def count(self, key: str, more: int = 0) -> int:
        """Add to the counter `key`; its value."""
        with self._answering():
            return int(self._store.add(key, more))

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # takes bytes, though torch's stub says text only

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed.DistError, whose kind differs from torch to torch
            line = str(error).strip().partition("\n")[0]
            raise StoreLost(
                f"torchrun's store at {self._where} does not answer ({line}): the node that serves it is gone"
            ) from None


def _split(data: bytearray) -> list[wire.Buffer]:
    view = memoryview(data)
    count = wire.count(view[: wire.HEAD.size])
    start = wire.HEAD.size + count * wire.LENGTH_BYTES
    found: list[wire.Buffer] = []
    for length in wire.lengths(view[wire.HEAD.size : start]):
        # Of its own, and writable: tensors take it for their memory.
        found.append(bytearray(view[start : start + length]))
        start += length
    return found
