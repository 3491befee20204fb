"""Where the ranks of one process meet for a collective, and what each kind makes of the tensors that they bring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fxbucket.ranks.flight_recorder import ranks_text
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.sums import Operation


class CollectiveMismatch(RuntimeError):
    """A rank launched another collective than the first member of its group did."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says of a collective: ``text`` for people, ``agreed`` what all members must say alike."""

    text: str
    agreed: Hashable


class Exchange:
    """One collective of the group of ``ranks``; ``index`` counts on it from 0, and is -1 where two ranks talk to each other."""

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._ranks, self._index = tuple(ranks), index
        self._brought: dict[int, Any] = {}
        self._first: tuple[int, Said] | None = None
        self._result: Any = None
        self._is_done = False

    def join(self, member: int, said: Said, brought: object) -> None:
        """Come as number ``member`` of the group with what it sends. Raises CollectiveMismatch."""
        rank = self._ranks[member]
        if self._first is None:
            self._first = rank, said
        first, told = self._first
        if told.agreed != said.agreed:
            where = f"as collective {self._index + 1} on" if self._index >= 0 else "between"
            raise CollectiveMismatch(
                f"rank {rank} launched {said.text} {where} {ranks_text(tuple(sorted(self._ranks)))}, "
                f"where rank {first} launched {told.text}"
            )
        self._brought[member] = brought

    @property
    def is_whole(self) -> bool:
        """Whether all members have come."""
        return len(self._brought) == len(self._ranks)

    def result(self, compute: Callable[[list[Any]], Any]) -> Any:
        """``compute`` of what the members sent, in the group's order: made once, for all.

        It is made at the first wait that finds all members here, and not before. A collective reads its inputs until its wait:
        a step that writes to one in between is wrong, and the later they are read, the more of such writes show in the values.
        By then the waiting rank has done all that it does before its wait: at least its write shows, and always the same way.
        """
        if not self._is_done:
            members = range(len(self._ranks))
            self._result = compute([self._brought[member] for member in members])
            self._brought = dict.fromkeys(members)
            self._is_done = True
        return self._result


@dataclass(slots=True)
class ExchangeTable:
    """The exchanges under way of one group of ``ranks``, by number; between two ranks by who talks to whom."""

    ranks: tuple[int, ...]
    under_way: dict[Hashable, Exchange] = field(default_factory=dict)

    def join(self, key: Hashable, members: tuple[int, ...], member: int, said: Said, brought: object) -> Exchange:
        """Come to the exchange ``key`` of ``members`` (numbers in the group) as ``member``. Raises CollectiveMismatch."""
        index = key if isinstance(key, int) else -1
        if key not in self.under_way:
            self.under_way[key] = Exchange([self.ranks[one] for one in members], index)
        exchange = self.under_way[key]
        exchange.join(members.index(member), said, brought)
        if exchange.is_whole:
            del self.under_way[key]
        return exchange


class Tables:
    """A table for each group of the process, found by its members under the group's name and ranks."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, ExchangeTable] = {}
        self._made: Counter[Hashable] = Counter()

    def sit_down(self, name: str, ranks: tuple[int, ...], member: int) -> ExchangeTable:
        """The table of the group ``name`` for its number ``member``; a group that is made again gets another."""
        made = (name, ranks, member)
        self._made[made] += 1
        return self._tables.setdefault((name, ranks, self._made[made]), ExchangeTable(ranks))


# What each kind of collective makes of the tensors that members sent: ``sent[m]`` are member m's; results are flat copies.


_Tensors = list[torch.Tensor]


def reduction(
    operation: Operation, ranks: Sequence[int], owner: Callable[[int], int | None]
) -> Callable[[list[_Tensors]], _Tensors]:
    """A function that combines the i-th tensors of all members, the ``ranks``, for all i.

    The member ``owner``(i) gets the result; None: all do.
    """
    add = sums.current()

    def reduce(sent: list[_Tensors]) -> _Tensors:
        return [
            add([_copy(part) for part in parts], operation, ranks, owner(index))
            for index, parts in enumerate(zip(*sent, strict=True))
        ]

    return reduce


def by_input(sent: list[_Tensors]) -> _Tensors:
    """Copies of the first tensors of all members, then of the second, and so on."""
    return [_copy(part) for parts in zip(*sent, strict=True) for part in parts]


def in_a_row(into: _Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy the parts that ``by_input`` gives into tensors that each take those of all members, one after the other."""
    for index, tensor in enumerate(into):
        members = len(parts) // len(into)
        mine = parts[index * members : (index + 1) * members]
        if tensor.is_contiguous():
            torch.cat(list(mine), out=tensor.detach().view(-1))
        else:
            fill([tensor], [torch.cat(list(mine))])


def copies_of_all(sent: list[_Tensors]) -> list[_Tensors]:
    """Copies of what each member sent."""
    return [[_copy(tensor) for tensor in tensors] for tensors in sent]


def copies_of(root: int) -> Callable[[list[_Tensors]], _Tensors]:
    """A function that copies what member ``root`` sent."""
    return lambda sent: [_copy(tensor) for tensor in sent[root]]


def slices(tensor: torch.Tensor, sizes: Sequence[int], world: int) -> _Tensors:
    """``world`` slices of the first dimension, of ``sizes`` rows or of equal ones. Raises ValueError."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and rows % world:
        raise ValueError(f"all_to_all of {rows} rows, which {world} ranks cannot share evenly")
    if sizes and sum(sizes) != rows:
        raise ValueError(f"all_to_all with slices of {', '.join(map(str, sizes))} rows of a tensor that has {rows}")
    return list(torch.split(tensor.detach(), list(sizes) or [rows // world] * world))


def fill(into: _Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy each part into its tensor, of any shape; no tensors: nothing. Raises CollectiveMismatch when one does not fit."""
    for tensor, part in zip(into, parts, strict=True) if into else ():
        if tensor.numel() != part.numel() or tensor.dtype != part.dtype:
            have, want = f"{tensor.numel():,} {_dtype(tensor)}", f"{part.numel():,} {_dtype(part)}"
            raise CollectiveMismatch(f"{want} arrived where {have} were expected")
        # Detached, or autograd would take the collective for an operation of its own.
        tensor.detach().copy_(part.view(tensor.shape))


def spoil(outputs: _Tensors, inputs: _Tensors) -> None:
    """Overwrite outputs that a collective has not filled yet with all-ones bits (NaN, -1), so that reading them early shows.

    Other back ends leave there what was there, sometimes even the right values. Outputs that overlap inputs stay.
    """
    used = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for tensor in outputs:
        if tensor.untyped_storage().data_ptr() in used or not tensor.is_contiguous() or tensor.dtype == torch.bool:
            continue
        if tensor.numel():
            tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)


def require_whole(output: torch.Tensor, source: torch.Tensor, world: int) -> None:
    """ValueError if ``output`` cannot take ``source`` of ``world`` members."""
    if output.numel() != source.numel() * world or output.dtype != source.dtype:
        have, want = f"{output.numel():,} {_dtype(output)}", f"{source.numel() * world:,} {_dtype(source)}"
        raise ValueError(f"all_gather into an output of {have}, where {want} are due")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).clone()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
