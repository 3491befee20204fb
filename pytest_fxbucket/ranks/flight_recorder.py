"""Where each rank is: its job's mark, and the collectives it launched, in shared memory that outlives the rank.

One record a rank: a head (mark, counts, what the rank does now), a table of process groups (members, how many launches, a
checksum over them), sums over the messages that it sent and received, and a ring of the last launches. A rank writes its own
and the parent reads all, also of ranks that hang or are dead. A launch costs the rank some 4 us.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Sequence
from ctypes import Structure, c_bool, c_char, c_uint8, c_uint16, c_uint32, c_uint64, sizeof
from dataclasses import dataclass
from typing import Any

MARK_BYTES = 200
FROM_ANY = "receive from any rank"
"""The kind of a receive that names no rank; others are "receive from rank 3", sends "send to rank 3"."""
_MOST_GROUPS = 64
_RING = 256

_LAUNCHED, _WAITS, _PAST = 0, 1, 2
_DOES = {_LAUNCHED: "launched", _WAITS: "waits for", _PAST: "is past"}


class _Group(Structure):
    _fields_ = (
        *(("launches", c_uint32), ("checksum", c_uint32), ("at_mark", c_uint32)),
        *(("members", c_char * 256), ("name", c_char * 128)),
    )


class _Launch(Structure):
    """``index`` counts on its group from 0, ``number`` since the mark from 1."""

    _fields_ = (
        *(("index", c_uint32), ("number", c_uint32), ("group", c_uint8), ("is_compared", c_bool)),
        *(("kind", c_char * 48), ("dtype", c_char * 16), ("numel", c_uint64)),
    )


class _Record(Structure):
    """``kept``: groups that stay from job to job. ``doing``: number of the launch at hand, from 1; ``does``: its state.

    ``acting``, in the first record only: one more than the rank that ``act_as`` was called for last.
    """

    _fields_ = (
        *(("mark_length", c_uint16), ("mark", c_uint8 * MARK_BYTES)),
        *(("group_count", c_uint32), ("kept", c_uint32), ("acting", c_uint32)),
        *(("launch_count", c_uint32), ("doing", c_uint32), ("does", c_uint8)),
        *(("sent", c_uint64), ("received", c_uint64)),
        *(("groups", _Group * _MOST_GROUPS), ("ring", _Launch * _RING)),
    )


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
        """The part of a launch that must be equal on all members."""
        return self.what if self.is_compared else self.kind


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One process group of a rank: its members, how many collectives the rank launched on it, and a checksum over them."""

    members: tuple[int, ...]
    count: int
    checksum: int
    name: str = ""
    """What graphs call it; empty where launches on all groups of these members are counted as one's."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """What one rank's flight record says. ``at``: the collective at hand; ``does``: launched, waits for or is past it."""

    mark: str = ""
    at: RecordedLaunch | None = None
    does: str = ""
    groups: tuple[RecordedGroup, ...] = ()
    launches: tuple[RecordedLaunch, ...] = ()
    """The last 256, in order."""
    sent: int = 0
    """A sum over all messages that it sent to one other rank, whatever their order; ``received``: over those it received."""
    received: int = 0

    @property
    def waits(self) -> bool:
        """Whether it waits for the collective at hand."""
        return self.does == _DOES[_WAITS]

    @property
    def text(self) -> str:
        """The collective at hand in words; "" if none was launched."""
        if self.at is None:
            return ""
        return f"{self.does} {self.at.what}, number {self.at.number} on {ranks_text(self.groups[self.at.group].members)}"


class FlightRecords:
    """The parent's side: the records of ``world`` ranks in an anonymous file, whose descriptor ``fd`` goes to the ranks."""

    def __init__(self, world: int) -> None:
        self.fd = os.memfd_create("fxbucket-records", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, world * sizeof(_Record))
        self._records: Sequence[_Record] = _mapped(self.fd, world)

    def read(self, rank: int) -> RankPosition:
        """What ``rank`` wrote since the last clear."""
        return _position(self._records[rank])

    def acting(self) -> int | None:
        """The rank that the one process of all ranks plays now, or played last; None before the first."""
        number = int(self._records[0].acting)
        return number - 1 if number else None

    def clear(self, rank: int) -> None:
        """Forget the mark, all launches, and the process groups that came after ``settle``."""
        record = self._records[rank]
        record.mark_length = record.launch_count = record.doing = record.sent = record.received = 0
        # The kept groups begin again from 0; later groups are overwritten by those of the next job.
        record.group_count = record.kept
        for index in range(record.kept):
            group = record.groups[index]
            group.launches = group.checksum = group.at_mark = 0

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if self._records:
            self._records = ()
            os.close(self.fd)


def _position(record: _Record) -> RankPosition:
    """What a record says."""
    doing, count = record.doing, record.launch_count
    groups = record.groups[: min(record.group_count, _MOST_GROUPS)]
    return RankPosition(
        # A mark is cut by bytes, which may be in the middle of a character.
        bytes(record.mark[: min(record.mark_length, MARK_BYTES)]).decode("utf-8", "replace"),
        _launch(record, doing - 1) if doing else None,
        _DOES.get(record.does, "") if doing else "",
        tuple(
            RecordedGroup(_members(one.members.decode()), one.launches, one.checksum, one.name.decode("utf-8", "replace"))
            for one in groups
        ),
        tuple(_launch(record, number) for number in range(max(0, count - _RING), count)),
        record.sent,
        record.received,
    )


def _launch(record: _Record, number: int) -> RecordedLaunch:
    one = record.ring[number % _RING]
    kind, dtype = (text.decode("utf-8", "replace") for text in (one.kind, one.dtype))
    return RecordedLaunch(one.group, one.index, one.number, one.is_compared, kind, dtype, one.numel)


def _mapped(fd: int, world: int) -> Any:
    return (_Record * world).from_buffer(mmap.mmap(fd, world * sizeof(_Record)))


_all: Sequence[_Record] = ()
"""The records that this process may write."""
_own: _Record | None = None
"""The record that it writes now."""


def adopt(fd: int, world: int) -> None:
    """Write into the records of ``world`` ranks behind ``fd`` from now on; called once, in the rank's process."""
    global _all, _own
    _all = _mapped(fd, world)
    _own = _all[0]


def act_as(rank: int) -> None:
    """Write into the record of ``rank`` from now on: a process may play several ranks, one at a time."""
    global _own
    if _all:
        _own = _all[rank]
        _all[0].acting = rank + 1


def settle() -> None:
    """Keep the process groups that there are now, from job to job."""
    if _own is not None:
        _own.kept = _own.group_count


def mark(text: str) -> None:
    """Leave ``text`` (cut to 200 bytes of UTF-8) as where this rank is; failures show it. Outside of a rank: nothing.

    The collectives launched from here on are numbered from 1 again.
    """
    if _own is None:
        return
    data = text.encode("utf-8", "replace")[:MARK_BYTES]
    ctypes.memmove(_own.mark, data, len(data))
    _own.mark_length = len(data)
    for index in range(min(_own.group_count, _MOST_GROUPS)):
        group = _own.groups[index]
        group.at_mark = group.launches


def group(ranks: tuple[int, ...], name: str = "") -> int:
    """Enter the group ``name`` of these global ranks; its handle, or -1 outside of a rank and where the table has no room."""
    members = _spans(ranks).encode()
    # Members that are cut off would make it another group, whose other members launch nothing.
    if _own is None or (index := _own.group_count) >= _MOST_GROUPS or len(members) > _Group.members.size:
        return -1
    _own.groups[index] = _Group(0, 0, 0, members, name.encode()[:127])
    _own.group_count = index + 1
    return int(index)


def launch(handle: int, kind: str, dtype: str = "", numel: int = 0, *, compared: bool = True) -> int:
    """Enter a launch on group ``handle``; a token for ``waits`` and ``waited``.

    All members must launch the same kinds in the same order, and where ``compared`` of the same dtype and element count too.
    """
    if _own is None or handle < 0 or handle >= _own.group_count:
        return 0
    said = (f"{kind} {dtype} {numel}" if compared else kind).encode()
    group = _own.groups[handle]
    count, number = group.launches, _own.launch_count
    # Two members' counts and checksums tell whether all their launches agree, though the ring has only the last of them.
    group.checksum = zlib.crc32(said, group.checksum)
    group.launches = count + 1
    texts = kind.encode()[:47], dtype.encode()[:15]
    _own.ring[number % _RING] = _Launch(count, count + 1 - group.at_mark, handle, compared, *texts, numel)
    # ``doing`` is written last: who reads in between sees the launch before.
    _own.launch_count = number + 1
    _own.does, _own.doing = _LAUNCHED, number + 1
    return int(number) + 1


def message(sender: int, receiver: int, tag: int, dtype: str, numel: int, *, received: bool) -> None:
    """Count a message between two global ranks, as this one sent or ``received`` it: both must say the same of it."""
    if _own is None:
        return
    said = zlib.crc32(f"{sender} {receiver} {tag} {dtype} {numel}".encode()) + 1
    # Modulo 2^64, as the field has it.
    if received:
        _own.received += said
    else:
        _own.sent += said


def waits(token: int) -> None:
    """Enter that this rank waits for the launch of ``token`` now."""
    if _own is not None and token:
        _own.does, _own.doing = _WAITS, token


def waited(token: int) -> None:
    """Enter that the launch of ``token`` has arrived."""
    if _own is not None and token:
        _own.does, _own.doing = _PAST, token


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


def _members(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for span in text.split(","):
        span, _, stride = span.partition("/")
        low, _, high = span.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1, int(stride or 1))
    return tuple(found)
