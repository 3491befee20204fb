"""What a launch does to the contents that it sends: a gather, a scatter or a sum, told as runs of new sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.collectives import Launch
from pytest_fxbucket.graph.contents import OWN_RANK, UNDEFINED, ZERO, ByteRange, Runs

if TYPE_CHECKING:
    from torch import fx

_new = tuple.__new__
UNEVEN = "it does not send each rank the same piece of every gradient"


@dataclass(frozen=True, slots=True)
class Source:
    """Where elements come from."""

    node: fx.Node
    numel: int
    """Elements on one rank."""
    dtype: torch.dtype
    launch: fx.Node | None = None
    """The launch that reduced or gathered the elements that ``node`` computed; None for the elements of ``node`` itself."""
    sent: int = -1
    """Number of the source that ``launch`` sent."""
    ranks: tuple[int, ...] = ()
    """Sizes of the groups that it was gathered over, the outermost first."""


@dataclass(frozen=True, slots=True)
class SentPiece:
    """A member of a launch on this rank, in bytes: of a gather a part of the input, of a reduction a part of the result."""

    offset: int
    length: int
    source: int
    dtype: torch.dtype


@dataclass(slots=True)
class SentLaunch:
    """A launch, and what its input holds."""

    launch: Launch
    dtype: torch.dtype | None = None
    """None if the launch sends several tensors of different dtypes."""
    numel: int = 0
    """Elements of the input on one rank."""
    bytes: int = 0
    content: list[SentPiece] = field(default_factory=list)
    problem: str = ""
    """Why the content could not be told; empty if it could."""
    symbolic: str = ""
    """A size of the input that is no number."""


@dataclass(slots=True)
class SourceTable:
    """Every source by its number; the numbers UNDEFINED and ZERO stand for no source."""

    found: list[Source | None] = field(default_factory=lambda: [None, None])

    def add(self, source: Source) -> int:
        """The number of a new source."""
        self.found.append(source)
        return len(self.found) - 1

    def known(self, number: int) -> Source:
        """The source ``number``, which is neither undefined nor zero."""
        source = self.found[number]
        assert source is not None
        return source

    def brought_source(self, number: int, launch: fx.Node, numel: int, dtype: torch.dtype, ranks: tuple[int, ...] = ()) -> int:
        """The number of a new source: the elements of the source ``number`` as ``launch`` brought them."""
        old = self.known(number)
        return self.add(Source(old.node, numel, dtype, launch, number, ranks))

    def gathered(self, sent: SentLaunch, tensor: torch.Tensor, content: Runs, ranks: int) -> tuple[Runs, Sequence[int]]:
        """(content, shape) of the result of a gather of ``tensor``; the members are added to ``sent``."""
        begin, own = sent.bytes, tensor.nbytes
        new, inner = dict[int, int](), dict[int, int]()
        for number in _named(content):
            old = self.known(number)
            new[number] = self.brought_source(number, sent.launch.node, old.numel, old.dtype, (ranks, *old.ranks))
            inner[number] = prod(old.ranks)
        sent.content += _pieces(_renamed(content, new), begin, tensor.dtype)
        # Each run of one rank's input as (run, new source, ranks that the source was gathered over before, rank among them).
        # Rank r of this gather then has the indices from r * width on: groups nest, the one gathered last being the outermost.
        each = [
            (one, new[one[2]], inner[one[2]], max(one[3], 0)) if one[2] > ZERO else (one, one[2], 0, OWN_RANK)
            for one in content
        ]
        runs = tuple(
            [
                _new(ByteRange, (one[0] + rank * own, one[1], number, rank * width + first, *one[4:]))
                for rank in range(ranks)
                for one, number, width, first in each
            ]
        )
        return runs, (tensor.shape[0] * ranks, *tensor.shape[1:]) if tensor.dim() else (ranks,)

    def scattered(self, sent: SentLaunch, tensor: torch.Tensor, content: Runs, ranks: int) -> tuple[Runs, Sequence[int]] | str:
        """(content, shape) of the result of a reduce-scatter, or why it cannot be told; the members are added to ``sent``."""
        # Of a coalesced launch earlier tensors are in ``sent`` already; members have offsets behind the results of those.
        begin, own = sent.bytes // ranks, tensor.nbytes // ranks
        first = contents.first(content, own)
        if other := _seen_as(content, tensor.dtype):
            return other
        if not self._scattered_evenly(first, content, own, ranks):
            return UNEVEN
        runs: list[ByteRange] = []
        for one in first:
            if one.source > ZERO:
                new = self.brought_source(one.source, sent.launch.node, one.length // tensor.itemsize, tensor.dtype)
                sent.content.append(SentPiece(begin + one.offset, one.length, new, tensor.dtype))
                runs += contents.shifted(contents.run(new, one.length, one.precision, tensor.dtype), one.offset)
            else:
                runs += contents.shifted(contents.run(ZERO, one.length), one.offset)
        result = tuple(runs) if _named(first) else contents.run(UNDEFINED, own)
        return result, (tensor.shape[0] // ranks, *tensor.shape[1:])

    def _scattered_evenly(self, first: Runs, content: Runs, own: int, ranks: int) -> bool:
        """Whether rank k's part of the input is, member by member, the k-th piece of the same whole gradients."""
        # Rank 0's part says which members there are and how long their pieces are. From that follows what the whole input must
        # hold: of each member piece k in part k, the last ones shorter or missing if the gradient ends before.
        expected: list[ByteRange] = []
        pieces: dict[int, ByteRange] = {}
        for one in first:
            if one.source <= ZERO:
                continue
            piece, size = pieces.setdefault(one.source, one), self._bytes(one)
            if one.start != 0 or piece.length != one.length or -(-size // ranks) > one.length:
                return False
            for rank, start in enumerate(range(0, min(size, ranks * one.length), one.length)):
                have = min(size - start, one.length)
                at = one.offset + rank * own
                expected.append(_new(ByteRange, (at, have, piece.source, piece.rank, start, piece.precision, piece.form)))
        return contents.joined(sorted(expected)) == tuple(one for one in content if one.source > ZERO)

    def _bytes(self, one: ByteRange) -> int:
        """Bytes of the whole source of ``one`` on one rank, in the dtype that it has in ``one``."""
        return self.known(one.source).numel * contents.dtype_of(one.form).itemsize

    def summed(self, sent: SentLaunch, tensor: torch.Tensor, content: Runs) -> tuple[Runs, Sequence[int]] | str:
        """(content, shape) of the result of an all-reduce, or why it cannot be told; the members are added to ``sent``."""
        if other := _seen_as(content, tensor.dtype):
            return other
        if any(one.rank != OWN_RANK for one in content):
            return "it reduces what a launch gathered"
        new: dict[int, int] = {}
        for number in _named(content):
            runs = [one for one in content if one.source == number]
            new[number] = self.brought_source(number, sent.launch.node, self.known(number).numel, tensor.dtype)
            begin, length = runs[0].offset, sum(one.length for one in runs)
            sent.content.append(SentPiece(sent.bytes + begin, length, new[number], tensor.dtype))
        return _renamed(content, new), tensor.shape


def _renamed(content: Runs, new: Mapping[int, int]) -> Runs:
    """The same runs with each source replaced by that in ``new``."""
    return tuple(one._replace(source=new[one.source]) if one.source > ZERO else one for one in content)


def _named(content: Runs) -> list[int]:
    """Sources in ``content``, in order of first appearance."""
    return [number for number in dict.fromkeys(one.source for one in content) if number > ZERO]


def _seen_as(content: Runs, dtype: torch.dtype) -> str:
    """Why a reduction in ``dtype`` is wrong: it adds bits of another dtype as if they were ``dtype``; empty if it does not."""
    forms = {one.form for one in content if one.source > ZERO}
    other = sorted(str(contents.dtype_of(form)) for form in forms - {contents.form_of(dtype)})
    return f"it reduces {other[0]} seen as {dtype}" if other else ""


def _pieces(runs: Runs, begin: int, dtype: torch.dtype) -> list[SentPiece]:
    """Members that a gather sends, from byte ``begin`` on: one for each run.

    Runs in a row of one source and of ascending ranks are one member: an earlier gather brought them from its ranks.
    """
    found: list[SentPiece] = []
    number = last = OWN_RANK
    for offset, length, source, rank, _, _, form in runs:
        if source == ZERO:
            number = OWN_RANK
        elif source == number and rank > last >= 0:
            found[-1] = replace(found[-1], length=begin + offset + length - found[-1].offset)
        else:
            found.append(SentPiece(begin + offset, length, source, contents.dtype_of(form) if form else dtype))
            number = source
        last = rank
    return found
