"""Sums in the order of NCCL's ring, where what an element's addends are added in depends on where it lies in its message.

A ring sends partial sums from rank to rank: whoever has a piece in the end adds its own addend last, and the rank behind it in
the ring begins. NCCL splits a message over channels, each with a ring of its own; of an all-reduce a channel splits its part
into rounds of as many chunks as there are ranks, each of which ends at another rank. So moving an element within a bucket may
change its bits from three ranks on (of an all-reduce; of a reduce-scatter from four on, since x + y is y + x), and NCCL's are
not gloo's.

Source: NCCL 2.30, `runRing` in src/device/reduce_scatter.h, all_reduce.h and reduce.h, the parts of channels in src/enqueue.cc,
`FuncPreMulSum` in src/device/reduce_kernel.h.
What differs there: a message below 32 KiB of traffic a channel uses fewer of them, and smaller chunks; messages launched as one
share the channels; which rings there are depends on the machine's links; trees, NVLS and CollNet add in other orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

import torch

from pytest_fxbucket.ranks.arithmetic import Operation, addends, averaged, combining

_CELL_BYTES = 16
"""What channels and chunks are multiples of."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Adds what ranks sent as NCCL's ring on ``channels`` channels does."""

    channels: int
    chunk_bytes: int
    """Largest piece of an all-reduce that ends at one rank."""
    ranks_per_node: int
    """Global ranks 0 to this one are the first node's, and so on."""

    def __call__(
        self, parts: Sequence[torch.Tensor], operation: Operation, ranks: Sequence[int], owner: int | None
    ) -> torch.Tensor:
        """All ``parts``, flat and of one dtype, by the group's ``ranks``, combined into a new tensor.

        ``owner`` is the place in the group of whoever gets the result; None: all do, as of an all-reduce.
        """
        combine = combining(operation)
        parts = addends(parts, operation)
        total = parts[0].clone()
        for channel, begin, end in self._spans(total):
            ring = self.order(channel, ranks)
            for last, low, high in (
                [(ring.index(owner), begin, end)] if owner is not None else self._chunks(total, begin, end, ring)
            ):
                piece = total[low:high]
                first, *others = [ring[(last + step) % len(ring)] for step in range(1, len(ring) + 1)]
                piece.copy_(parts[first][low:high])
                for place in others:
                    combine(piece, parts[place][low:high], out=piece)
        return averaged(total, operation, len(parts))

    def order(self, channel: int, ranks: Sequence[int]) -> list[int]:
        """Places in the group ``ranks`` (ascending global ranks) in the order of the ring ``channel``.

        From node to node; within each a channel begins one rank further on, and steps on by another width.
        """
        found: list[int] = []
        for _, of_node in groupby(range(len(ranks)), lambda place: ranks[place] // self.ranks_per_node):
            places = list(of_node)
            count = len(places)
            widths = [width for width in range(1, count + 1) if gcd(width, count) == 1]
            found += [places[(channel + step * widths[channel % len(widths)]) % count] for step in range(count)]
        return found

    def _spans(self, message: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """(channel, begin, end) of the elements of each channel that has some."""
        share = _whole_cells(-(-message.numel() // self.channels), message)
        for channel, begin in enumerate(range(0, message.numel(), share or 1)):
            yield channel, begin, min(begin + share, message.numel())

    def _chunks(self, message: torch.Tensor, begin: int, end: int, ring: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(place in the ring of the rank that adds last, begin, end) of each chunk of an all-reduce on one channel."""
        count = len(ring)
        while begin < end:
            most = max(1, self.chunk_bytes // _CELL_BYTES) * _CELL_BYTES // message.itemsize
            chunk = min(most, _whole_cells(-(-(end - begin) // count), message))
            for last in range(count):
                low = begin + last * chunk
                if low < end:
                    yield last, low, min(low + chunk, end)
            begin += count * chunk


def _whole_cells(count: int, message: torch.Tensor) -> int:
    """``count`` elements, and as many more as make it whole cells."""
    width = max(1, _CELL_BYTES // message.itemsize)
    return -(-count // width) * width
