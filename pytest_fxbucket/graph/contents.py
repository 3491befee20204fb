"""What a storage holds, told as runs of bytes of named sources, without holding any byte.

A storage's content is a row of runs, sorted by offset, that covers it without gaps. All units are bytes, so that a storage may
be seen as elements of any size. Copying between strided views is exact for any views, and costs time by the number of runs, not
of elements: a launch over 4,096 ranks is some thousand runs.

Plain tuples, since nearly all contents are of a handful of runs: tensors and arrays cost more to set up than to loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph import contents

UNDEFINED, ZERO = 0, 1
OWN_RANK = -1
EXACT = 1 << 10
"""Precision of a value that no float dtype has narrowed yet; more bits than any mantissa has."""


_new = tuple.__new__
"""Makes a :class:`ByteRange` at a third of the cost of calling the class; there are hundreds of thousands of them."""


class ByteRange(NamedTuple):
    """``length`` bytes of a storage, and where they are from."""

    offset: int
    """Bytes of the storage before it."""
    length: int
    source: int
    """Number of the source, UNDEFINED or ZERO."""
    rank: int
    """Index in its group of the rank whose bytes they are; OWN_RANK: this rank's."""
    start: int
    """Bytes of the source before it; 0 if the source is undefined or zero."""
    precision: int
    """Bits of mantissa that every dtype on its way kept; EXACT if none of them was a float."""
    form: int
    """The dtype that elements of the source have there (:func:`dtype_of`); 0 if the source is undefined or zero."""

    @property
    def end(self) -> int:
        """Offset of the byte behind it."""
        return self.offset + self.length

    def part(self, begin: int, end: int, at: int) -> ByteRange:
        """Its bytes from offset ``begin`` to ``end``, moved to offset ``at``."""
        offset, _, source, rank, start, precision, form = self
        # Undefined bytes and zeros are alike wherever they are: their start stays 0, so that neighbours can be joined.
        return _new(
            ByteRange, (at, end - begin, source, rank, start + begin - offset if source > ZERO else start, precision, form)
        )

    def at(self, offset: int) -> ByteRange:
        """The same, at another offset."""
        return _new(ByteRange, (offset, *self[1:]))


Runs = tuple[ByteRange, ...]

_offset = itemgetter(0)
_DTYPES: list[torch.dtype] = []


def form_of(dtype: torch.dtype) -> int:
    """The number that stands for ``dtype`` in a run. The form 0 belongs to bytes that are undefined or zero, of any dtype."""
    if dtype not in _DTYPES:
        _DTYPES.append(dtype)
    return _DTYPES.index(dtype) + 1


def dtype_of(form: int) -> torch.dtype:
    """The dtype that the number ``form`` > 0 stands for."""
    return _DTYPES[form - 1]


def run(source: int, length: int, precision: int = EXACT, dtype: torch.dtype | None = None) -> Runs:
    """One run of ``length`` bytes: all of ``source``, whose elements are of ``dtype``."""
    form = form_of(dtype) if dtype is not None else 0
    return (ByteRange(0, length, source, OWN_RANK, 0, precision, form),) if length else ()


def cast(runs: Runs, source: torch.dtype, target: torch.dtype, precision: int) -> Runs | None:
    """The same elements of dtype ``source`` as ``target``, which keeps ``precision`` bits; None if they are of another form."""
    old, new = source.itemsize, target.itemsize
    before, after = form_of(source), form_of(target)
    found = []
    for offset, length, number, rank, start, bits, form in runs:
        named = number > ZERO
        # A cast is told by scaling sizes, which needs whole elements that really are of the dtype that they are seen as.
        if (named and form != before) or offset % old or length % old or start % old:
            return None
        sizes = offset // old * new, length // old * new, start // old * new
        kept = bits if bits < precision else precision
        found.append(_new(ByteRange, (sizes[0], sizes[1], number, rank, sizes[2], kept, after if named else 0)))
    return tuple(found)


def blocks(tensor: torch.Tensor) -> tuple[list[int], int]:
    """The view as (starts, length) in bytes: its elements in logical order are blocks of ``length`` from each of ``starts``."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    length = width = tensor.itemsize
    # Inner dimensions without gaps make up one block. Each outer dimension then repeats the list of starts, stride by stride;
    # an expanded one (stride 0) repeats the same starts.
    while dims and dims[-1][1] * width == length:
        length *= dims.pop()[0]
    starts = [int(tensor.storage_offset()) * width]
    for size, stride in dims:
        steps = range(0, size * stride * width, stride * width) if stride else [0] * size
        starts = [start + step for start in starts for step in steps]
    return starts, length


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, each once, sorted as they lie in memory: a transposed or expanded matrix reads like itself."""
    if tensor.is_contiguous():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] > 1 else tensor
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d]))
    return tensor.permute(order)


def read(content: Runs, view: torch.Tensor) -> Runs:
    """Runs of ``view`` in logical order; offsets count from 0."""
    starts, length = blocks(view)
    if length == 0 or not starts:
        return ()
    if len(starts) == 1 and length == size(content):
        return content
    found: list[ByteRange] = []
    offsets = [one[0] for one in content]
    for at, start in enumerate(starts):
        one = content[bisect_right(offsets, start) - 1]
        if start + length > one[0] + one[1]:
            found += _between(content, start, start + length, at * length)
        else:  # Nearly always: the block lies within one run.
            found.append(one.part(start, start + length, at * length))
    return joined(found)


def write(content: Runs, view: torch.Tensor, runs: Runs) -> Runs:
    """Content after ``runs``, as many bytes as ``view`` has, were copied into ``view``."""
    starts, length = blocks(view)
    if length == 0 or not starts:
        return content
    if len(starts) == 1 and length == size(content):
        return joined(runs)
    # Punch holes where the view's blocks are, lay the new runs into them, and sort by offset (the first field of a run).
    return joined(sorted([*_without(content, sorted(starts), length), *_laid(runs, starts, length)]))


def filled(parts: Iterable[tuple[torch.Tensor, Runs]]) -> Runs:
    """Content of a storage after its runs were copied into each view in ``parts``, which cover it without meeting."""
    pieces: list[ByteRange] = []
    for view, runs in parts:
        starts, length = blocks(view)
        if length and starts:
            pieces += _laid(runs, starts, length)
    return joined(sorted(pieces))


def first(content: Runs, length: int) -> Runs:
    """The first ``length`` bytes."""
    return joined(_between(content, 0, length, 0))


def cut(runs: Runs, length: int) -> Runs:
    """The same runs, none of which crosses a multiple of ``length``."""
    found = []
    for one in runs:
        begin = one.offset
        if begin % length + one.length <= length:  # Most runs cross nothing and stay the object that they are.
            found.append(one)
            continue
        while begin < one.end:
            end = min(one.end, begin // length * length + length)
            found.append(one.part(begin, end, begin))
            begin = end
    return tuple(found)


def size(content: Runs) -> int:
    """Bytes that ``content`` tells of."""
    return content[-1].end if content else 0


def joined(runs: Iterable[ByteRange]) -> Runs:
    """The same content in as few runs as possible."""
    found: list[ByteRange] = []
    last = None
    for one in runs:
        # Comparing ranks here spares the call for the many runs of a gathered value, each of which is of another rank.
        if last is not None and last[3] == one[3] and _follows(last, one):
            one = found[-1] = last._replace(length=last.length + one.length)
        else:
            found.append(one)
        last = one
    return tuple(found)


def shifted(runs: Runs, offset: int) -> Runs:
    """The same runs, ``offset`` further on."""
    return tuple(one.at(one.offset + offset) for one in runs)


def ascends(runs: Runs, shard_numel: int, ranks: Sequence[int]) -> bool:
    """Whether ``runs`` are elements of one gathered source, in its order over all ranks; parts may be left out.

    Each rank holds ``shard_numel`` elements. ``ranks`` are the sizes of the groups that the source was gathered over, the
    outermost first. With two groups either of them may count as the outer one.
    """
    if len({(one.source, one.form) for one in runs}) != 1 or any(one.rank < 0 for one in runs):
        return False
    shard = shard_numel * dtype_of(runs[0].form).itemsize
    orders = [[one.rank for one in runs]]
    if len(ranks) == 2:
        # A run's rank is outer * ranks[1] + inner; the other nesting is inner * ranks[0] + outer.
        orders.append([rank % ranks[1] * ranks[0] + rank // ranks[1] for rank in orders[0]])
    return any(_in_order(runs, [rank * shard for rank in order]) for order in orders)


def whole_elements(runs: Runs) -> bool:
    """Whether every run of a source begins and ends between elements of its form."""
    return not any(one.form and (one.start % (width := dtype_of(one.form).itemsize) or one.length % width) for one in runs)


def _in_order(runs: Runs, begins: Sequence[int]) -> bool:
    """Whether each run ends at or before the begin of the next one; ``begins`` are the places of their shards in the source."""
    starts = [begin + one.start for begin, one in zip(begins, runs, strict=True)]
    return all(start + one.length <= after for start, one, after in zip(starts, runs, starts[1:], strict=False))


def _follows(a: ByteRange, b: ByteRange) -> bool:
    """Whether ``b`` goes on where ``a`` ends, in the storage and in the source."""
    return (
        a.rank == b.rank
        and a.source == b.source
        and a.end == b.offset
        and a.start + (a.length if a.source > ZERO else 0) == b.start
        and a.precision == b.precision
        and a.form == b.form
    )


def _between(content: Runs, begin: int, end: int, at: int) -> list[ByteRange]:
    """The bytes from offset ``begin`` to ``end``, moved to offset ``at``."""
    found: list[ByteRange] = []
    index = bisect_right(content, begin, key=_offset) - 1
    while begin < end:
        one = content[index]
        high = min(end, one.end)
        found.append(one.part(begin, high, at))
        at += high - begin
        begin = high
        index += 1
    return found


def _laid(runs: Runs, starts: Sequence[int], length: int) -> list[ByteRange]:
    """``runs`` one behind the other in blocks of ``length`` at ``starts``."""
    return [one.at(starts[one.offset // length] + one.offset % length) for one in cut(runs, length)]


def _without(content: Runs, starts: Sequence[int], length: int) -> Iterator[ByteRange]:
    """Content with the blocks of ``length`` at ``starts`` (ascending) taken out, so that they can be put anew."""
    for one in content:
        begin = one.offset
        index = bisect_right(starts, begin - length)  # The first block that ends behind ``begin``.
        while index < len(starts) and starts[index] < one.end:
            if begin < starts[index]:
                yield one.part(begin, starts[index], begin)
            begin = starts[index] + length
            index += 1
        if begin < one.end:
            yield one.part(begin, one.end, begin)


# What every storage of a graph holds, and copies between views of storages.


MANTISSA_BITS = {
    torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7,
    torch.float8_e4m3fn: 3, torch.float8_e4m3fnuz: 3, torch.float8_e5m2: 2, torch.float8_e5m2fnuz: 2, torch.float8_e8m0fnu: 0,
    torch.complex128: 52, torch.complex64: 23, torch.complex32: 10,
}  # fmt: skip
"""Bits of mantissa of each floating or complex dtype whose loss is followed; every other dtype counts as exact."""


def precision_of(dtype: torch.dtype) -> int:
    """Bits of mantissa that a value of ``dtype`` has; EXACT for what is neither a float nor complex."""
    return MANTISSA_BITS.get(dtype, contents.EXACT)


def _kept_mantissa_bits(source: torch.dtype, target: torch.dtype) -> int:
    """Bits of mantissa that a cast keeps at most: no fraction survives as an integer, no imaginary part as a real number."""
    if target.is_complex or not (source.is_floating_point or source.is_complex):
        return precision_of(target)
    return precision_of(target) if source.is_floating_point and target.is_floating_point else 0


class NotFollowedError(Exception):
    """An operator moves data in a way that runs cannot express; the message says how."""


class StorageContents:
    """Contents of every storage that was met so far."""

    def __init__(self) -> None:
        self._content: dict[int, Runs] = {}
        # Keys are addresses of storages, which are unique among living tensors only: so one tensor of each is kept alive.
        self._alive: dict[int, torch.Tensor] = {}

    def allocate(self, like: torch.Tensor, content: Runs | None = None) -> torch.Tensor:
        """A new contiguous meta tensor of ``like``'s shape and dtype, holding ``content`` (left out: undefined)."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self.define(tensor, contents.run(contents.UNDEFINED, tensor.nbytes) if content is None else content)
        return tensor

    def define(self, tensor: torch.Tensor, content: Runs) -> None:
        """Say what the whole storage under ``tensor`` holds."""
        key = storage_key(tensor)
        self._content[key], self._alive[key] = content, tensor

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``'s storage was allocated here."""
        return storage_key(tensor) in self._content

    def read(self, tensor: torch.Tensor) -> Runs:
        """Runs of ``tensor`` in logical order."""
        return contents.read(self._content[storage_key(tensor)], tensor)

    def write(self, target: torch.Tensor, runs: Runs) -> None:
        """Copy ``runs``, the bytes of as many elements in logical order, into the view ``target``."""
        key = storage_key(target)
        self._content[key] = contents.write(self._content[key], target, runs)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``target.copy_(source)``."""
        self.write(target, self.cast(source.expand(target.shape), target.dtype))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> Runs:
        """Runs of ``tensor``'s elements, in logical order, as ``dtype``; a cast to fewer bits is noted in them."""
        runs = self.read(tensor)
        if tensor.dtype == dtype:
            return runs
        cast = contents.cast(runs, tensor.dtype, dtype, _kept_mantissa_bits(tensor.dtype, dtype))
        if cast is None:
            raise NotFollowedError(f"it casts {tensor.dtype} that other elements are seen as to {dtype}")
        return cast
