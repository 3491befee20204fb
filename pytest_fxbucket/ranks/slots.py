"""One small slot of shared memory for each rank, in which a job leaves an opaque "where am I" string."""

from __future__ import annotations

import mmap
import os
import struct

MARK_BYTES = 200
_SLOT_BYTES = 256
_LENGTH = struct.Struct("=H")

_own: tuple[mmap.mmap, int] | None = None


class Slots:
    """The parent's side: `world` slots in an anonymous file, whose descriptor `fd` goes to the ranks."""

    def __init__(self, world: int) -> None:
        self.fd = os.memfd_create("fxbucket-slots", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, world * _SLOT_BYTES)
        self._map = mmap.mmap(self.fd, world * _SLOT_BYTES)

    def read(self, rank: int) -> str:
        """The last mark of `rank`, at most 200 bytes of UTF-8; "" when it left none."""
        start = rank * _SLOT_BYTES
        (length,) = _LENGTH.unpack_from(self._map, start)
        text = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, MARK_BYTES)]
        return text.decode("utf-8", "replace")

    def clear(self, rank: int) -> None:
        """Forget the mark of `rank`."""
        _LENGTH.pack_into(self._map, rank * _SLOT_BYTES, 0)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)


def adopt(fd: int, rank: int, world: int) -> None:
    """Make slot `rank` of the shared memory behind `fd` this process's own; called once, in the rank."""
    global _own
    _own = (mmap.mmap(fd, world * _SLOT_BYTES), rank * _SLOT_BYTES)


def mark(text: str) -> None:
    """Leave `text` (cut to 200 bytes of UTF-8) as where this rank is; failures show it. Outside of a rank: nothing."""
    if _own is None:
        return
    memory, start = _own
    data = text.encode("utf-8", "replace")[:MARK_BYTES]
    first = start + _LENGTH.size
    memory[first : first + len(data)] = data
    _LENGTH.pack_into(memory, start, len(data))
