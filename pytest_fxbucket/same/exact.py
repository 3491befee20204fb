"""Contents of storages as runs of bytes of expressions. A cast makes a new expression, since it may change any value."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.contents import EXACT, OWN_RANK, ByteRange, NotFollowedError, Runs, StorageContents
from pytest_fxbucket.same.table import UNDEFINED, ZERO, Const, ExpressionTable, Key, SourceBytes, const

Ranks = tuple[int, ...]


@cache
def among(members: Ranks) -> Const:
    """The ranks of a collective as a constant. Of its group nothing else goes into an expression."""
    return Const("ranks", ",".join(map(str, members)))


class ExactContents(StorageContents):
    """Contents of storages, whose sources are numbers of expressions."""

    def __init__(self, table: ExpressionTable) -> None:
        super().__init__()
        self.table = table
        self._versions: dict[int, int] = {}

    def define(self, tensor: torch.Tensor, content: Runs) -> None:
        """Say what the whole storage under ``tensor`` holds."""
        super().define(tensor, content)
        self._written(tensor)

    def write(self, target: torch.Tensor, runs: Runs) -> None:
        """Copy ``runs``, the bytes of as many elements in logical order, into the view ``target``."""
        super().write(target, runs)
        self._written(target)

    def _written(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        self._versions[key] = self._versions.get(key, 0) + 1

    def version(self, tensor: torch.Tensor) -> int:
        """How often ``tensor``'s storage was written so far."""
        return self._versions[storage_key(tensor)]

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> Runs:
        """Runs of ``tensor``'s elements, in logical order, as ``dtype``."""
        runs = self.read(tensor)
        if tensor.dtype == dtype:
            return runs
        old, new, before, after = tensor.itemsize, dtype.itemsize, contents.form_of(tensor.dtype), contents.form_of(dtype)
        how = (const(tensor.dtype), const(dtype))
        found = []
        for offset, length, source, rank, start, _, form in runs:
            # Zeros, and bytes that nobody wrote, are the same in every dtype: only how many there are changes.
            if source <= ZERO:
                found.append(ByteRange(offset // old * new, length // old * new, source, rank, start, EXACT, 0))
                continue
            if form != before or offset % old or length % old or start % old:
                raise NotFollowedError(f"it casts {tensor.dtype} that other elements are seen as to {dtype}")
            number = self.table.number(("cast", source, *how))
            found.append(ByteRange(offset // old * new, length // old * new, number, rank, start // old * new, EXACT, after))
        return tuple(found)


def expression(table: ExpressionTable, tensor: torch.Tensor, memory: StorageContents) -> Key | int:
    """What ``tensor`` stands for: a source, if it is all of one as that is; else the key of its bytes, shape and strides.

    Bytes are listed in memory order, since a transposed matrix is one run there and a thousand in logical order. Strides say
    which element is which. Gaps between elements are left out of them: other tensors read what lies there.
    """
    # A value that was packed and unpacked unchanged must get its own number back: its readers then stand for what they did.
    runs, strides = memory.read(contents.in_memory_order(tensor)), _without_gaps(tensor)
    if len(runs) == 1:
        one = runs[0]
        known = table.facts.get(one.source)
        if (
            one.source > ZERO
            and one.rank == OWN_RANK
            and one.start == 0
            and isinstance(known, torch.Tensor)
            and known.dtype == tensor.dtype == contents.dtype_of(one.form)
            and known.shape == tensor.shape
            and known.is_contiguous()
            and strides == _without_gaps(known)
        ):
            return one.source
    form = Const("tensor", f"{tensor.dtype} {tuple(tensor.shape)} {strides}")
    return ("bytes", form, tuple(spans(runs)))


def _without_gaps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that ``tensor`` would have if its elements lay one behind the other, in the same order in memory."""
    if tensor.is_contiguous():
        strides = [1] * tensor.dim()
        for dim in range(tensor.dim() - 2, -1, -1):
            strides[dim] = strides[dim + 1] * tensor.shape[dim + 1]
        # The stride of a dimension of size 1 selects nothing, and two tensors with the same elements may differ in it.
        return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, strides, strict=True))
    found, step = [0] * tensor.dim(), 1
    lying = tensor.stride()
    for dim in sorted(range(tensor.dim()), key=lambda d: (lying[d], tensor.shape[d])):
        # An expanded dimension (stride 0) takes no memory and stays at 0.
        if tensor.shape[dim] != 1 and lying[dim]:
            found[dim] = step
            step *= tensor.shape[dim]
    return tuple(found)


def spans(runs: Runs) -> list[tuple[int, SourceBytes]]:
    """Runs as (source, place). Equal runs of consecutive ranks are one item, so 4,096 ranks give no longer list than two."""
    found: list[tuple[int, SourceBytes]] = []
    index = 0
    while index < len(runs):
        offset, length, source, rank, start, _, form = runs[index]
        times = 1
        while rank >= 0 and index + times < len(runs):
            one = runs[index + times]
            if one[:5] != (offset + times * length, length, source, rank + times, start) or one.form != form:
                break
            times += 1
        found.append((source, SourceBytes(offset, length, rank, start, form, times)))
        index += times
    return found


def gathered(table: ExpressionTable, runs: Runs, own: int, members: Ranks, ranks_of: dict[int, int]) -> Runs:
    """Content of the gather of ``runs``, ``own`` bytes on each of ``members``.

    ``ranks_of`` has the number of ranks that each source was gathered over before. Groups nest: member k of this gather has the
    rank indices from k times that number on.
    """
    new: dict[int, int] = {}
    for source in {one.source for one in runs if one.source > ZERO}:
        new[source] = table.number(("gathered", source, among(members)))
        ranks_of[new[source]] = len(members) * ranks_of.get(source, 1)
    return tuple(
        ByteRange(
            offset + index * own, length, new[source], index * ranks_of.get(source, 1) + max(rank, 0), start, precision, form
        )
        if source > ZERO
        else ByteRange(offset + index * own, length, source, rank, start, precision, form)
        for index in range(len(members))
        for offset, length, source, rank, start, precision, form in runs
    )


def reduced(table: ExpressionTable, runs: Runs, op: str, dtype: torch.dtype, members: Ranks) -> Runs:
    """Content of the reduction of ``runs`` over ``members`` by ``op`` (a sum, say), whose bytes it takes for ``dtype``."""
    how = (const(op), const(dtype), among(members))
    form = contents.form_of(dtype)
    # Each element is reduced by itself. So the key has no places in the source: one expression stands for the whole reduced
    # source, of which runs have the bytes that they had.
    return tuple(
        one
        if one.source <= ZERO
        else one._replace(
            source=table.number(("reduced", one.source, SourceBytes(0, 0, one.rank, 0, one.form), *how)),
            rank=OWN_RANK,
            form=form,
        )
        for one in runs
    )


def scattered(table: ExpressionTable, runs: Runs, own: int, op: str, dtype: torch.dtype, members: Ranks) -> Runs:
    """Content of this rank's ``own`` bytes of a reduce-scatter of ``runs``; arguments as for :func:`reduced`.

    The key of a source has the bytes that this rank sends to every member at that place, not to itself alone. So a fault in the
    part of another rank shows on this rank, too.
    """
    # Cut the input into one chunk for each member, then all chunks at the borders of runs of any of them. Between two borders
    # each chunk has one piece, and these pieces together are one source.
    how, form = (const(op), const(dtype), among(members)), contents.form_of(dtype)
    chunks: list[list[ByteRange]] = [[] for _ in members]
    for one in contents.cut(runs, own):
        chunks[one.offset // own].append(one.at(one.offset % own))
    edges = sorted({own, *(one.offset for chunk in chunks for one in chunk)})
    places = [0] * len(chunks)
    found: list[ByteRange] = []
    for begin, end in pairwise(edges):
        pieces = []
        for index, chunk in enumerate(chunks):
            while chunk[places[index]].end <= begin:
                places[index] += 1
            pieces.append(chunk[places[index]].part(begin, end, begin))
        first = next((one.start for one in pieces if one.source > ZERO), None)
        if first is None:
            # No member sends data here, only filling.
            source = UNDEFINED if any(one.source == UNDEFINED for one in pieces) else ZERO
            found.append(ByteRange(begin, end - begin, source, OWN_RANK, 0, EXACT, 0))
            continue
        source = table.number(("scattered", _steps(pieces, first), *how))
        # It starts where the first piece does, so that neighbours of one gradient are joined to one run below.
        found.append(ByteRange(begin, end - begin, source, OWN_RANK, first, EXACT, form))
    return contents.joined(found)


def _steps(pieces: list[ByteRange], first: int) -> Key:
    """The piece that each member is sent, as (source, start counted from ``first``); one item if the starts ascend evenly.

    Counted from ``first``, all pieces of one gradient have the same key, wherever the borders fall.
    """
    starts = [one.start - first if one.source > ZERO else 0 for one in pieces]
    alike = {(one.source, one.rank, one.form) for one in pieces}
    if len(alike) == 1 and len(pieces) > 1 and len({b - a for a, b in pairwise(starts)}) == 1:
        one = pieces[0]
        return ((one.source, SourceBytes(0, 0, one.rank, starts[1], one.form, len(pieces))),)
    return tuple((one.source, SourceBytes(0, 0, one.rank, at, one.form)) for one, at in zip(pieces, starts, strict=True))
