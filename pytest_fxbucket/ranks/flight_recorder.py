"""Where each rank is: its job's mark, and the collectives it launched, in shared memory that outlives the rank.

One ledger a rank, little endian: a head (mark, counts, what the rank does now), a table of process groups (members, how many
launches, a checksum over them), and a ring of the last launches. A rank writes its own and the parent reads all, also of ranks
that hang or are dead. A launch costs the rank some 4 us.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass

MARK_BYTES = 200
_MOST_GROUPS = 64
_RING = 256

_HEAD = struct.Struct("<H200sIIIB")  # length and bytes of the mark; groups; launches; the launch at hand, and what it is about
_GROUPS_AT, _LAUNCHES_AT, _DOING_AT, _KEPT_AT = 202, 206, 210, 215
_ACTING_AT = 220  # in the first ledger: one more than the rank that wrote act_as last
_COUNT = struct.Struct("<I")
_DOING = struct.Struct("<IB")
_GROUP = struct.Struct("<III80s")  # launches, checksum, launches at the mark, members as text
_COUNTS = struct.Struct("<III")
_LAUNCH = struct.Struct("<IIB?28s16sQ")  # number on the group, the same since the mark, group, compared, kind, dtype, elements
_HEAD_BYTES, _GROUP_BYTES, _LAUNCH_BYTES = 256, 96, 64
_RING_AT = _HEAD_BYTES + _MOST_GROUPS * _GROUP_BYTES
_LEDGER_BYTES = _RING_AT + _RING * _LAUNCH_BYTES

_LAUNCHED, _WAITS, _PAST = 0, 1, 2
_DOES = {_LAUNCHED: "launched", _WAITS: "waits for", _PAST: "is past"}


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One collective that a rank launched; ``index`` counts on its group from 0, ``number`` since the last mark from 1."""

    group: int
    index: int
    number: int
    is_compared: bool
    kind: str
    dtype: str
    numel: int

    @property
    def what(self) -> str:
        """Kind, size and dtype."""
        return f"{self.kind} of {self.numel:,} {self.dtype}" if self.dtype else self.kind

    @property
    def agreed(self) -> str:
        """What all members must say alike."""
        return self.what if self.is_compared else self.kind


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One process group of a rank: its members, how many collectives the rank launched on it, and a checksum over them."""

    members: tuple[int, ...]
    count: int
    checksum: int


@dataclass(frozen=True, slots=True)
class RankPosition:
    """What one rank's ledger says. ``does``: launched, waits for, is past; of ``at``, the collective at hand, if any."""

    mark: str = ""
    at: RecordedLaunch | None = None
    does: str = ""
    groups: tuple[RecordedGroup, ...] = ()
    launches: tuple[RecordedLaunch, ...] = ()
    """The last 256, in order."""

    @property
    def text(self) -> str:
        """The collective at hand in words; "" if none was launched."""
        if self.at is None:
            return ""
        return f"{self.does} {self.at.what}, number {self.at.number} on {ranks_text(self.groups[self.at.group].members)}"


class Ledgers:
    """The parent's side: the ledgers of ``world`` ranks in an anonymous file, whose descriptor ``fd`` goes to the ranks."""

    def __init__(self, world: int) -> None:
        self.fd = os.memfd_create("fxbucket-ledgers", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, world * _LEDGER_BYTES)
        self._map = mmap.mmap(self.fd, world * _LEDGER_BYTES)

    def read(self, rank: int) -> RankPosition:
        """What ``rank`` wrote since the last clear."""
        start = rank * _LEDGER_BYTES
        length, mark, groups, launched, doing, does = _HEAD.unpack_from(self._map, start)
        return RankPosition(
            mark[: min(length, MARK_BYTES)].decode("utf-8", "replace"),
            self._launch(start, doing - 1) if doing else None,
            _DOES.get(does, "") if doing else "",
            self.groups(rank)[:groups],
            tuple(self._launch(start, index) for index in range(max(0, launched - _RING), launched)),
        )

    def groups(self, rank: int) -> tuple[RecordedGroup, ...]:
        """The process groups of ``rank``: the quick look that tells whether all ranks launched the same."""
        start = rank * _LEDGER_BYTES
        (count,) = _COUNT.unpack_from(self._map, start + _GROUPS_AT)
        found = []
        for index in range(min(count, _MOST_GROUPS)):
            launches, checksum, _, members = _GROUP.unpack_from(self._map, start + _HEAD_BYTES + index * _GROUP_BYTES)
            found.append(RecordedGroup(_members(members), launches, checksum))
        return tuple(found)

    def acting(self) -> int | None:
        """Of a world whose ranks are all in one process: the rank that it plays, or played last; None before the first."""
        (number,) = _COUNT.unpack_from(self._map, _ACTING_AT)
        return int(number) - 1 if number else None

    def clear(self, rank: int) -> None:
        """Forget the mark, all launches, and the process groups that came after ``settle``."""
        start = rank * _LEDGER_BYTES
        (groups,) = _COUNT.unpack_from(self._map, start + _KEPT_AT)
        _HEAD.pack_into(self._map, start, 0, b"", groups, 0, 0, 0)
        for index in range(groups):
            _COUNTS.pack_into(self._map, start + _HEAD_BYTES + index * _GROUP_BYTES, 0, 0, 0)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)

    def _launch(self, start: int, position: int) -> RecordedLaunch:
        at = start + _RING_AT + position % _RING * _LAUNCH_BYTES
        index, number, group, is_compared, kind, dtype, numel = _LAUNCH.unpack_from(self._map, at)
        return RecordedLaunch(group, index, number, is_compared, _text(kind), _text(dtype), numel)


class _Own:
    """The ledger that this process writes now."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.start = memory, 0

    def number(self, at: int) -> int:
        return int(_COUNT.unpack_from(self.memory, self.start + at)[0])


_own: _Own | None = None


def adopt(fd: int, world: int) -> None:
    """Write into the ledgers of ``world`` ranks behind ``fd`` from now on; called once, in the rank's process."""
    global _own
    _own = _Own(mmap.mmap(fd, world * _LEDGER_BYTES))


def act_as(rank: int) -> None:
    """Write into the ledger of ``rank`` from now on: a process may play several ranks, one at a time."""
    if _own is not None:
        _own.start = rank * _LEDGER_BYTES
        _COUNT.pack_into(_own.memory, _ACTING_AT, rank + 1)


def settle() -> None:
    """Keep the process groups that there are now, from job to job."""
    if _own is not None:
        _COUNT.pack_into(_own.memory, _own.start + _KEPT_AT, _own.number(_GROUPS_AT))


def mark(text: str) -> None:
    """Leave ``text`` (cut to 200 bytes of UTF-8) as where this rank is; failures show it. Outside of a rank: nothing.

    The collectives launched from here on are numbered from 1 again.
    """
    if _own is None:
        return
    data = text.encode("utf-8", "replace")[:MARK_BYTES]
    struct.pack_into("<H200s", _own.memory, _own.start, len(data), data)
    for index in range(min(_own.number(_GROUPS_AT), _MOST_GROUPS)):
        at = _own.start + _HEAD_BYTES + index * _GROUP_BYTES
        launches, checksum, _ = _COUNTS.unpack_from(_own.memory, at)
        _COUNTS.pack_into(_own.memory, at, launches, checksum, launches)


def group(ranks: tuple[int, ...]) -> int:
    """Enter a process group of these global ranks; its handle, or -1 outside of a rank and when the table is full."""
    if _own is None or (index := _own.number(_GROUPS_AT)) >= _MOST_GROUPS:
        return -1
    members = _spans(ranks).encode()[:80]
    _GROUP.pack_into(_own.memory, _own.start + _HEAD_BYTES + index * _GROUP_BYTES, 0, 0, 0, members)
    _COUNT.pack_into(_own.memory, _own.start + _GROUPS_AT, index + 1)
    return index


def launch(handle: int, kind: str, dtype: str = "", numel: int = 0, *, compared: bool = True) -> int:
    """Enter a launch on group ``handle``; a token for ``waits`` and ``waited``.

    All members must launch the same kinds in the same order, and where ``compared`` of the same dtype and element count too.
    """
    if _own is None or handle < 0 or handle >= _own.number(_GROUPS_AT):
        return 0
    at = _own.start + _HEAD_BYTES + handle * _GROUP_BYTES
    count, checksum, base = _COUNTS.unpack_from(_own.memory, at)
    said = (f"{kind} {dtype} {numel}" if compared else kind).encode()
    _COUNTS.pack_into(_own.memory, at, count + 1, zlib.crc32(said, checksum), base)
    position = _own.number(_LAUNCHES_AT)
    record = (count, count + 1 - base, handle, compared, kind.encode()[:28], dtype.encode()[:16], numel)
    _LAUNCH.pack_into(_own.memory, _own.start + _RING_AT + position % _RING * _LAUNCH_BYTES, *record)
    # The doing goes last: who reads in between sees the launch before.
    _COUNT.pack_into(_own.memory, _own.start + _LAUNCHES_AT, position + 1)
    _DOING.pack_into(_own.memory, _own.start + _DOING_AT, position + 1, _LAUNCHED)
    return position + 1


def waits(token: int) -> None:
    """Enter that this rank waits for the launch of ``token`` now."""
    if _own is not None and token:
        _DOING.pack_into(_own.memory, _own.start + _DOING_AT, token, _WAITS)


def waited(token: int) -> None:
    """Enter that the launch of ``token`` has arrived."""
    if _own is not None and token:
        _DOING.pack_into(_own.memory, _own.start + _DOING_AT, token, _PAST)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """``ranks 0-3``, ``ranks 0, 2``, ``rank 1``."""
    spans = _spans(ranks).replace(",", ", ")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans}"


def _spans(ranks: tuple[int, ...]) -> str:
    """Ascending ranks as "0-3,6"; with an even stride as "0-12/4"."""
    stride = ranks[1] - ranks[0] if len(ranks) > 2 else 1
    if stride > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}-{ranks[-1]}/{stride}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _members(text: bytes) -> tuple[int, ...]:
    found: list[int] = []
    for span in _text(text).split(","):
        span, _, stride = span.partition("/")
        low, _, high = span.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1, int(stride or 1))
    return tuple(found)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
