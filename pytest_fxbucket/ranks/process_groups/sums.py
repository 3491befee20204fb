"""Reductions on any back end of ours: in rank order, or in the order of NCCL's ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple, Protocol

import torch


class ReduceOperation(NamedTuple):
    """What addends are combined by."""

    name: str
    """As torch's ReduceOp has it."""
    factor: float | torch.Tensor | None = None
    """What each addend is multiplied by first, in its own dtype, as NCCL does; None: nothing, or of an average 1/ranks."""

    @property
    def label(self) -> str:
        """For people, and to tell what ranks launch apart."""
        return self.name.lower() if self.factor is None else f"{self.name.lower()} {float(self.factor):g}"


# What makes one addend of two, into ``out``.
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


_PREMULTIPLIED = frozenset({torch.float32, torch.bfloat16})


def in_rank_order(
    parts: Sequence[torch.Tensor], operation: ReduceOperation, ranks: Sequence[int] = (), owner: int | None = None
) -> torch.Tensor:
    """All ``parts``, in their order, combined into the first, which is returned.

    ``ranks`` and ``owner`` make no difference to this order.
    """
    share, combine = share_of(parts, operation), _COMBINE[operation.name]
    if share is not None:
        parts = [part.mul_(share) for part in parts]
    total = parts[0]
    for part in parts[1:]:
        combine(total, part, out=total)
    return averaged(total, operation, len(parts))


def share_of(parts: Sequence[torch.Tensor], operation: ReduceOperation) -> torch.Tensor | None:
    """What each addend is multiplied by, for an average 1/ranks, as in NCCL and DDP; None: they are added as they are.

    This holds for float32 and bfloat16. Of other dtypes FSDP2 adds up the parts as they are, and divides the sum.
    """
    is_premultiplied = operation.name == "AVG" and parts[0].dtype in _PREMULTIPLIED
    factor = 1 / len(parts) if is_premultiplied else operation.factor
    return None if factor is None else torch.as_tensor(factor, dtype=parts[0].dtype, device=parts[0].device)


def averaged(total: torch.Tensor, operation: ReduceOperation, ranks: int) -> torch.Tensor:
    """``total`` of all addends of ``operation``, divided by ``ranks`` if it is an average whose addends were not scaled."""
    return total.div_(ranks) if operation.name == "AVG" and total.dtype not in _PREMULTIPLIED else total


def operation_of(opts: Any, tensors: Sequence[torch.Tensor]) -> ReduceOperation:
    """The operation in ``opts``; ValueError if there is none in rank order, or none for the dtype of ``tensors``."""
    name = str(opts.reduceOp.op.name)
    if name not in _COMBINE:
        raise ValueError(f"reductions in rank order have no {name}; expected one of {', '.join(_COMBINE)}")
    for tensor in tensors:
        if name in ("AVG", "PREMUL_SUM") and not (tensor.is_floating_point() or tensor.is_complex()):
            what = "an average" if name == "AVG" else "a sum of products"
            raise ValueError(f"{what} of {tensor.dtype}; expected a floating dtype")
    # FSDP2's set_gradient_divide_factor makes PREMUL_SUM, which tells its factor in its pickled state only.
    return ReduceOperation(name, opts.reduceOp.__getstate__()[1] if name == "PREMUL_SUM" else None)


def even_chunks(source: torch.Tensor, world: int) -> list[torch.Tensor]:
    """``world`` equal chunks of ``source``, flat; ValueError if they are not equal."""
    if source.numel() % world:
        raise ValueError(f"reduce_scatter of {source.numel()} elements, which {world} ranks cannot share evenly")
    return list(source.detach().contiguous().view(world, -1).unbind())


def require_same_size(output: torch.Tensor, piece: torch.Tensor) -> None:
    """ValueError if ``output`` cannot take ``piece``."""
    if output.numel() != piece.numel() or output.dtype != piece.dtype:
        have, want = f"{output.numel()} {output.dtype}", f"{piece.numel()} {piece.dtype}"
        raise ValueError(f"reduce_scatter into an output of {have}, where {want} are due")


# The order in which the ranks' addends are added: rank order, unless the job at hand asks for another one.


class Sums(Protocol):
    """How the addends of all ranks become one tensor."""

    def __call__(
        self, parts: Sequence[torch.Tensor], operation: ReduceOperation, ranks: Sequence[int], owner: int | None
    ) -> torch.Tensor:
        """Combine ``parts``, flat and of one dtype, one of each of the group's ``ranks``; ``parts`` may be written.

        ``owner`` is the place in the group of the rank that gets the result; None: all do.
        """
        ...


_now: Sums = in_rank_order


def add_by(sums: Sums = in_rank_order) -> None:
    """From now on launches of this process add by ``sums``; a rank's next job begins in rank order again."""
    global _now
    _now = sums


def current() -> Sums:
    """How a collective that is launched now adds, though it may do so later."""
    return _now


# Sums in the order of NCCL's ring, where the order of an element's addends depends on the element's place in its message.
#
# A ring sends partial sums from rank to rank: whoever has a piece in the end adds its own addend last, and the rank behind it
# in the ring begins. NCCL splits a message over channels, each with a ring of its own; of an all-reduce a channel splits its
# part into rounds of as many chunks as there are ranks, each of which ends at another rank. So moving an element within a
# bucket may change its bits from three ranks on (of an all-reduce; of a reduce-scatter from four on, since x + y is y + x), and
# NCCL's are not gloo's. Of an average only whoever begins rounds its share: a GPU multiplies and adds the others' in one. So
# averages of denormals depend on place on two ranks already, and all do where 1/ranks is no power of two.
#
# Source: NCCL 2.30, ``runRing`` in src/device/reduce_scatter.h, all_reduce.h and reduce.h, the parts of channels in
# src/enqueue.cc, ``FuncPreMulSum`` in src/device/reduce_kernel.h. What differs there: a message below 32 KiB of traffic a
# channel uses fewer of them, and smaller chunks; messages launched as one share the channels; which rings there are depends on
# the machine's links; trees, NVLS and CollNet add in other orders.


_CELL_BYTES = 16
"""A channel's part of a message, and a chunk, are multiples of this."""


@dataclass(frozen=True, slots=True)
class RingOrder:
    """Adds what ranks sent as NCCL's ring on ``channels`` channels does."""

    channels: int
    chunk_bytes: int
    """Largest piece of an all-reduce that ends at one rank."""
    ranks_per_node: int
    """How many ranks a node has: the first so many global ranks are on the first node, and so on."""

    def __call__(
        self, parts: Sequence[torch.Tensor], operation: ReduceOperation, ranks: Sequence[int], owner: int | None
    ) -> torch.Tensor:
        """All ``parts``, flat and of one dtype, by the group's ``ranks``, combined into a new tensor.

        ``owner`` is the place in the group of whoever gets the result; None: all do, as of an all-reduce.
        """
        combine, share = _COMBINE[operation.name], share_of(parts, operation)
        total = parts[0].clone()
        for channel, begin, end in self._spans(total):
            ring = self.order(channel, ranks)
            for last, low, high in (
                [(ring.index(owner), begin, end)] if owner is not None else self._chunks(total, begin, end, ring)
            ):
                piece = total[low:high]
                # The rank at place ``last`` of the ring adds last, so the one behind it begins.
                first, *others = [ring[(last + step) % len(ring)] for step in range(1, len(ring) + 1)]
                piece.copy_(parts[first][low:high] if share is None else parts[first][low:high] * share)
                for addend in (parts[place][low:high] for place in others):
                    if share is None:
                        combine(piece, addend, out=piece)
                    else:
                        piece.copy_(multiplied_and_added(addend, share, piece))
        return averaged(total, operation, len(parts))

    def order(self, channel: int, ranks: Sequence[int]) -> list[int]:
        """Places in the group ``ranks`` (ascending global ranks) in the order of the ring ``channel``.

        From node to node; within each a channel begins one rank further on, and steps on by another width.
        """
        found: list[int] = []
        for _, of_node in groupby(range(len(ranks)), lambda place: ranks[place] // self.ranks_per_node):
            places = list(of_node)
            count = len(places)
            # Only a width without a common factor with the number of places comes by all of them.
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


def multiplied_and_added(factor: torch.Tensor, other: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """``factor * other + addend``, rounded once, as a fused multiply-add of a GPU does. float32 and bfloat16; of others twice.

    A product of two such numbers is exact in float64, their sum need not be. What was cut off there is kept as the last bit,
    so that rounding again to fewer bits gives what rounding once would have (Boldo and Melquiond, "Emulation of a FMA and
    correctly rounded sums: proved algorithms using rounding to odd").
    """
    if addend.dtype not in _PREMULTIPLIED:
        return factor * other + addend
    product, summand = factor.double() * other.double(), addend.double()
    total = product + summand
    part = total - product
    found = _odd(total, (product - (total - part)) + (summand - part))
    if addend.dtype is torch.bfloat16:  # torch rounds to float32 on the way
        narrow = found.float()
        found = _odd(narrow, found - narrow.double())
    return found.to(addend.dtype)


def _odd(rounded: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """``rounded`` if its last bit is set or nothing was cut off, else its neighbour on the side of ``rest``, which was."""
    bits = rounded.view(torch.int64 if rounded.dtype is torch.float64 else torch.int32)
    neighbour = torch.nextafter(rounded, torch.copysign(torch.full_like(rounded, torch.inf), rest.to(rounded.dtype)))
    return torch.where((rest != 0) & rest.isfinite() & (bits % 2 == 0), neighbour, rounded)


def _whole_cells(count: int, message: torch.Tensor) -> int:
    """``count`` elements, and as many more as make it whole cells."""
    width = max(1, _CELL_BYTES // message.itemsize)
    return -(-count // width) * width
