"""What a launch does to the contents that it sends: a gather, a scatter or a sum, told as runs of new sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.collectives import Launch
from pytest_fxbucket.graph.contents import FORM, LENGTH, OFFSET, OWN_RANK, PRECISION, RANK, SOURCE, START, ZERO, Runs

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Source:
    """Where elements come from."""

    node: fx.Node
    numel: int
    """On one rank."""
    dtype: torch.dtype
    launch: fx.Node | None = None
    """The launch that brought it: the reduction of ``node``'s elements, or their gather; None for what ``node`` computed."""
    sent: int = -1
    """Number of the source that ``launch`` sent."""
    ranks: tuple[int, ...] = ()
    """Sizes of the groups that it was gathered over, the outermost first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A member of a launch on this rank: for a gather of what it sends, for a reduction of what it brings. In bytes."""

    offset: int
    length: int
    source: int
    dtype: torch.dtype


@dataclass(slots=True)
class Sent:
    """A launch, and what its input holds."""

    launch: Launch
    index: int
    """Position among all launches of the graph."""
    dtype: torch.dtype | None = None
    """None if it launches several tensors that do not agree in it."""
    numel: int = 0
    """Elements of the input on one rank."""
    bytes: int = 0
    content: list[Piece] = field(default_factory=list)
    problem: str = ""
    """Why the content could not be told; empty if it could."""
    symbolic: str = ""
    """A size of the input that is no number."""


@dataclass(slots=True)
class Sources:
    """Every source by its number; UNDEFINED and ZERO are none."""

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

    def brought(self, number: int, launch: fx.Node, numel: int, dtype: torch.dtype, ranks: tuple[int, ...] = ()) -> int:
        """The number of what ``launch`` brought of the source ``number``."""
        old = self.known(number)
        return self.add(Source(old.node, numel, dtype, launch, number, ranks))

    def gathered(self, sent: Sent, tensor: torch.Tensor, content: Runs, ranks: int) -> tuple[Runs, Sequence[int]]:
        """(content, shape) of the result of a gather of ``tensor``; the members are added to ``sent``."""
        begin, own = sent.bytes, tensor.nbytes
        out = content.clone()
        for number in _named(content):
            old = self.known(number)
            rows = content[:, SOURCE] == number
            new = self.brought(number, sent.launch.node, old.numel, old.dtype, (ranks, *old.ranks))
            out[rows, SOURCE] = new
        sent.content += _pieces(out, begin, tensor.dtype)
        rows = out.repeat(ranks, 1)
        rank = torch.arange(ranks).repeat_interleave(len(out))
        inner = self._ranks_inside(out).repeat(ranks)
        rows[:, OFFSET] += rank * own
        rows[:, RANK] = torch.where(rows[:, SOURCE] > ZERO, rank * inner + rows[:, RANK].clamp(min=0), OWN_RANK)
        return rows, (tensor.shape[0] * ranks, *tensor.shape[1:]) if tensor.dim() else (ranks,)

    def _ranks_inside(self, runs: Runs) -> torch.Tensor:
        """For each run over how many ranks it was gathered before."""
        sizes = []
        for number in runs[:, SOURCE].tolist():
            ranks = self.known(number).ranks[1:] if number > ZERO else ()
            sizes.append(int(torch.Size(ranks).numel()))
        return torch.tensor(sizes, dtype=torch.int64)

    def scattered(self, sent: Sent, tensor: torch.Tensor, content: Runs, ranks: int) -> tuple[Runs, Sequence[int]] | str:
        """(content, shape) of the result of a reduce-scatter, or why it cannot be told; the members are added to ``sent``."""
        begin, own = sent.bytes // ranks, tensor.nbytes // ranks
        first = contents.read(content, torch.empty(own, dtype=torch.uint8, device="meta"))
        first = first[first[:, SOURCE] > ZERO]
        if other := _seen_as(content, tensor.dtype):
            return other
        if not self._scattered_evenly(first, content, own, ranks):
            return "it does not send each rank the same piece of every gradient"
        rows = []
        for offset, length, number, precision in first[:, [OFFSET, LENGTH, SOURCE, PRECISION]].tolist():
            new = self.brought(number, sent.launch.node, length // tensor.itemsize, tensor.dtype)
            sent.content.append(Piece(begin + offset, length, new, tensor.dtype))
            rows.append(contents.shifted(contents.run(new, length, precision, tensor.dtype), offset))
        return torch.cat(rows) if rows else contents.run(0, own), (tensor.shape[0] // ranks, *tensor.shape[1:])

    def _scattered_evenly(self, first: Runs, content: Runs, own: int, ranks: int) -> bool:
        """Whether rank k's part of the input is, member by member, the k-th piece of the same whole gradients."""
        expected = []
        for offset, length, number, start, form in first[:, [OFFSET, LENGTH, SOURCE, START, FORM]].tolist():
            size = self.known(number).numel * contents.dtype_of(form).itemsize
            piece = next((r[LENGTH] for r in first.tolist() if r[SOURCE] == number), 0)
            if start != 0 or piece != length or -(-size // ranks) > length:
                return False
            index = torch.arange(ranks)
            have = (size - index * length).clamp(0, length)
            row = first[first[:, SOURCE] == number][:1].repeat(ranks, 1)
            row[:, OFFSET], row[:, START], row[:, LENGTH] = offset + index * own, index * length, have
            expected.append(row[have > 0])
        wanted = torch.cat(expected) if expected else content[:0]
        wanted = contents.joined(wanted[torch.sort(wanted[:, OFFSET]).indices])
        return torch.equal(wanted, content[content[:, SOURCE] > ZERO])

    def summed(self, sent: Sent, tensor: torch.Tensor, content: Runs) -> tuple[Runs, Sequence[int]] | str:
        """(content, shape) of the result of an all-reduce, or why it cannot be told; the members are added to ``sent``."""
        if other := _seen_as(content, tensor.dtype):
            return other
        if bool((content[:, RANK] != OWN_RANK).any()):
            return "it reduces what a launch gathered"
        out = content.clone()
        for number in _named(content):
            rows = content[:, SOURCE] == number
            new = self.brought(number, sent.launch.node, self.known(number).numel, tensor.dtype)
            out[rows, SOURCE] = new
            begin, length = int(content[rows, OFFSET].min()), int(content[rows, LENGTH].sum())
            sent.content.append(Piece(sent.bytes + begin, length, new, tensor.dtype))
        return out, tensor.shape


def _named(content: Runs) -> list[int]:
    """Sources in ``content``, in order of first appearance."""
    return [number for number in dict.fromkeys(content[:, SOURCE].tolist()) if number > ZERO]


def _seen_as(content: Runs, dtype: torch.dtype) -> str:
    """What a reduction in ``dtype`` adds up although it is of another dtype; empty if there is nothing of the kind."""
    forms = {form for source, form in content[:, [SOURCE, FORM]].tolist() if source > ZERO}
    other = sorted(str(contents.dtype_of(form)) for form in forms - {contents.form_of(dtype)})
    return f"it reduces {other[0]} seen as {dtype}" if other else ""


def _pieces(runs: Runs, begin: int, dtype: torch.dtype) -> list[Piece]:
    """Members that a gather sends, from byte ``begin`` on: a run each, but those of the ranks of an earlier gather are one."""
    found: list[Piece] = []
    number = last = OWN_RANK
    for offset, length, source, rank, *_, form in runs.tolist():
        if source == ZERO:
            number = OWN_RANK
        elif source == number and rank > last >= 0:
            found[-1] = replace(found[-1], length=begin + offset + length - found[-1].offset)
        else:
            found.append(Piece(begin + offset, length, source, contents.dtype_of(form) if form else dtype))
            number = source
        last = rank
    return found
