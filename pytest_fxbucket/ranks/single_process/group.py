"""A process group whose members are all in this process, one at a time (see scheduler.py); reductions add in rank order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks.flight_recorder import ranks_text
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.base import (
    ReducingGroup,
    ReducingWork,
    Tensors,
    dtype_of,
    listed,
    numel_of,
    require_contiguous,
    require_whole,
    root_of,
    rows_of,
)
from pytest_fxbucket.ranks.process_groups.sums import ReduceOperation
from pytest_fxbucket.ranks.single_process.scheduler import TurnScheduler

# Where the ranks of one process meet for a collective.


class CollectiveMismatch(RuntimeError):
    """A rank launched another collective than the first member of its group did."""


@dataclass(frozen=True, slots=True)
class MemberCall:
    """What a member says of a collective: ``text`` for people, ``agreed`` what all members must say alike."""

    text: str
    agreed: Hashable


class Exchange:
    """One collective of ``ranks``; ``index``: its number on their group, from 0, or -1 for a send and its receive."""

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._ranks, self._index = tuple(ranks), index
        self._brought: dict[int, Any] = {}
        self._first: tuple[int, MemberCall] | None = None
        self._result: Any = None
        self._is_done = False

    def join(self, member: int, said: MemberCall, brought: object) -> None:
        """Come as number ``member`` of the group with what it sends. Raises CollectiveMismatch."""
        rank = self._ranks[member]
        if self._first is None:
            self._first = rank, said
        first, expected = self._first
        if expected.agreed != said.agreed:
            where = f"as collective {self._index + 1} on" if self._index >= 0 else "between"
            raise CollectiveMismatch(
                f"rank {rank} launched {said.text} {where} {ranks_text(tuple(sorted(self._ranks)))}, "
                f"where rank {first} launched {expected.text}"
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
            # The tensors can go; that all members came stays known by the keys.
            self._brought = dict.fromkeys(members)
            self._is_done = True
        return self._result


@dataclass(slots=True)
class ExchangeTable:
    """The exchanges under way of one group of ``ranks``, by number; between two ranks by who talks to whom."""

    ranks: tuple[int, ...]
    under_way: dict[Hashable, Exchange] = field(default_factory=dict)

    def join(self, key: Hashable, members: tuple[int, ...], member: int, said: MemberCall, brought: object) -> Exchange:
        """Come to the exchange ``key`` of ``members`` (numbers in the group) as ``member``. Raises CollectiveMismatch."""
        index = key if isinstance(key, int) else -1
        if key not in self.under_way:
            self.under_way[key] = Exchange([self.ranks[one] for one in members], index)
        exchange = self.under_way[key]
        exchange.join(members.index(member), said, brought)
        # Works hold their exchange. The table has only those that members are still to come to.
        if exchange.is_whole:
            del self.under_way[key]
        return exchange


class Tables:
    """A table for each group of the process, found by its members under the group's name and ranks."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, ExchangeTable] = {}
        self._made: Counter[Hashable] = Counter()

    def table_of(self, name: str, ranks: tuple[int, ...], member: int) -> ExchangeTable:
        """The table of the group ``name`` for its number ``member``; a group that is made again gets another."""
        made = (name, ranks, member)
        self._made[made] += 1
        return self._tables.setdefault((name, ranks, self._made[made]), ExchangeTable(ranks))


# What each kind of collective computes of the tensors that members sent. ``sent[m]`` are member m's; results are flat copies.


def reduction(
    operation: ReduceOperation, ranks: Sequence[int], owner: Callable[[int], int | None]
) -> Callable[[list[Tensors]], Tensors]:
    """A function that combines the i-th tensors of all members, the ``ranks``, for all i.

    The member ``owner``(i) gets the result; None: all do.
    """
    add = sums.current()

    def reduce(sent: list[Tensors]) -> Tensors:
        return [
            add([_copy(part) for part in parts], operation, ranks, owner(index))
            for index, parts in enumerate(zip(*sent, strict=True))
        ]

    return reduce


def by_input(sent: list[Tensors]) -> Tensors:
    """Copies of the first tensors of all members, then of the second, and so on."""
    return [_copy(part) for parts in zip(*sent, strict=True) for part in parts]


def in_a_row(into: Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy the parts that ``by_input`` gives into tensors that each take those of all members, one after the other."""
    for index, tensor in enumerate(into):
        members = len(parts) // len(into)
        mine = parts[index * members : (index + 1) * members]
        if tensor.is_contiguous():
            torch.cat(list(mine), out=tensor.detach().view(-1))
        else:
            fill([tensor], [torch.cat(list(mine))])


def copies_of_all(sent: list[Tensors]) -> list[Tensors]:
    """Copies of what each member sent."""
    return [[_copy(tensor) for tensor in tensors] for tensors in sent]


def copies_of(root: int) -> Callable[[list[Tensors]], Tensors]:
    """A function that copies what member ``root`` sent."""
    return lambda sent: [_copy(tensor) for tensor in sent[root]]


def slices(tensor: torch.Tensor, sizes: Sequence[int], world: int) -> Tensors:
    """``world`` slices of the first dimension, of ``sizes`` rows or of equal ones. Raises ValueError."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and rows % world:
        raise ValueError(f"all_to_all of {rows} rows, which {world} ranks cannot share evenly")
    if sizes and sum(sizes) != rows:
        raise ValueError(f"all_to_all with slices of {', '.join(map(str, sizes))} rows of a tensor that has {rows}")
    return list(torch.split(tensor.detach(), list(sizes) or [rows // world] * world))


def fill(into: Tensors, parts: Sequence[torch.Tensor]) -> None:
    """Copy each part into its tensor, of any shape; no tensors: nothing. Raises CollectiveMismatch when one does not fit."""
    for tensor, part in zip(into, parts, strict=True) if into else ():
        if tensor.numel() != part.numel() or tensor.dtype != part.dtype:
            have, want = f"{tensor.numel():,} {dtype_of([tensor])}", f"{part.numel():,} {dtype_of([part])}"
            raise CollectiveMismatch(f"{want} arrived where {have} were expected")
        # Detached, or autograd would take the collective for an operation of its own.
        tensor.detach().copy_(part.view(tensor.shape))


def spoil(outputs: Tensors, inputs: Tensors) -> None:
    """Overwrite outputs that a collective has not filled yet with all-ones bits (NaN, -1), so that reading them early shows.

    Other back ends leave there what was there, sometimes even the right values. Outputs that overlap inputs stay.
    """
    used = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    with torch.no_grad(), c10d.without_dispatch_modes():
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() in used or not tensor.is_contiguous() or tensor.dtype == torch.bool:
                continue
            if tensor.numel():
                tensor.detach().view(-1).view(torch.uint8).fill_(0xFF)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).clone()


# The group, as torch knows it.


class LocalWork(ReducingWork):
    """A collective under way. Its outputs are filled by this rank's own wait, and hold no numbers before."""

    def __init__(
        self, scheduler: TurnScheduler, rank: int, token: int, exchange: Exchange, finish: Callable[[], None], result: Tensors
    ) -> None:
        super().__init__(token, finish, result)
        self._scheduler, self._rank, self._exchange = scheduler, rank, exchange

    def _arrive(self, timeout: timedelta | None) -> None:
        """Raises Deadlock when that can never be. There is no time to run out."""
        self._scheduler.wait_until(self._rank, lambda: self._exchange.is_whole)

    def is_completed(self) -> bool:
        """Whether all members have come; then the outputs are filled. The others go on meanwhile."""
        if not self._exchange.is_whole:
            self._scheduler.pause(self._rank)
        if self._exchange.is_whole:
            self._finish_once()
        return self._finished

    def is_success(self) -> bool:
        """Whether the outputs are filled."""
        return self._finished

    def get_future(self) -> torch.futures.Future[Tensors]:
        """A future of the outputs, which waits here and now: who waits for it may do so where no other rank could go on."""
        self.wait()
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self._result)
        return future


class LocalGroup(ReducingGroup):
    """One rank's end of a group of ``table``, as its number ``member``. Launches and waits are recorded."""

    def __init__(self, name: str, table: ExchangeTable, member: int, scheduler: TurnScheduler) -> None:
        super().__init__(member, table.ranks, name)
        self._name, self._table, self._scheduler = name, table, scheduler
        self._launched = 0
        self._talks: Counter[Hashable] = Counter()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which graphs find it."""
        return self._name

    # What torch asks a group, or the back end behind it; here that is one.
    supports_coalescing = False
    supports_splitting = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    # Together with base.py these are all that torch lets a Python group override: ordered.py says why none may be left out.

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> c10d.Work:
        """Gather each of ``inputs`` of all members, one after the other, into the output beside it."""
        for output, source in zip(outputs, inputs, strict=True):
            require_whole(output, source, self.size())
        return self._launch("all_gather", inputs, inputs, outputs, by_input, in_a_row)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, *args: Any, **named: Any
    ) -> c10d.Work:
        """Gather ``inputs[i]`` of member m into ``outputs[i][m]``, for all m."""
        into = [tensor for row in rows_of(outputs) for tensor in row]
        return self._launch("all_gather", listed(inputs), listed(inputs), into, by_input, fill, compared=False)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        *args: Any,
        **named: Any,
    ) -> c10d.Work:
        """Send the m-th slice of ``source``'s first dimension to member m, whose slice for this one goes into ``output``."""
        require_contiguous("all_to_all_single", output, source)
        sent = slices(source, input_sizes, self.size())
        return self._to_all(slices(output, output_sizes, self.size()), sent, [output])

    def alltoall(  # type: ignore[override]
        self, outputs: Tensors, inputs: Tensors, *args: Any, **named: Any
    ) -> c10d.Work:
        """Send ``inputs[m]`` to member m, whose piece for this one goes into ``outputs[m]``."""
        return self._to_all(list(outputs), list(inputs), outputs)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Copy the root's tensors to all members."""
        root = root_of(opts, root=root)
        both = listed(tensors)
        sent, into = (both, []) if root == self.rank() else ([], both)
        return self._launch(f"broadcast of {root}", both, sent, into, copies_of(root), fill)

    def gather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Gather the one input of member m into the root's ``outputs[0][m]``, for all m."""
        root = root_of(opts, root=root)
        into = [tensor for row in rows_of(outputs) for tensor in row] if root == self.rank() else []
        return self._launch(f"gather to {root}", listed(inputs), listed(inputs), into, by_input, fill)

    def scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Send the root's ``inputs[0][m]`` to member m's one output."""
        root = root_of(opts, root=root)
        sent = [tensor for row in rows_of(inputs) for tensor in row] if root == self.rank() else []
        into = listed(outputs)

        def deliver(into: Tensors, copies: Tensors) -> None:
            fill(into, [copies[self.rank()]])

        return self._launch(f"scatter of {root}", into, sent, into, copies_of(root), deliver)

    def barrier(self, *args: Any, **named: Any) -> c10d.Work:
        """Wait for all members."""
        return self._launch("barrier", [], [], [], lambda sent: [], fill)

    def send(  # type: ignore[override]
        self, tensors: Any, peer: int, tag: int = 0, *args: Any, **named: Any
    ) -> c10d.Work:
        """Send tensors to the group's number ``peer``; over once it has received them."""
        return self._talk(f"send to rank {self._ranks[peer]}", listed(tensors), (self.rank(), peer), tag, [])

    def recv(  # type: ignore[override]
        self, tensors: Any, peer: int, tag: int = 0, *args: Any, **named: Any
    ) -> c10d.Work:
        """Receive tensors from the group's number ``peer``."""
        into = listed(tensors)
        return self._talk(f"receive from rank {self._ranks[peer]}", into, (peer, self.rank()), tag, into)

    def recv_anysource(self, *args: Any, **named: Any) -> c10d.Work:
        """Not to be had: raises NotImplementedError."""
        raise NotImplementedError("back end local cannot receive from any rank; name the rank (src=...)")

    def _all_reduce(self, kind: str, tensors: Tensors, operation: ReduceOperation, owner: int | None) -> c10d.Work:
        named = f"{kind}({operation.label})"
        into = tensors if owner in (None, self.rank()) else []
        compute = reduction(operation, self._ranks, lambda index: owner)
        return self._launch(named, tensors, tensors, into, compute, fill)

    def _reduce_rows(self, kind: str, outputs: Tensors, rows: list[Tensors], operation: ReduceOperation) -> c10d.Work:
        sent = [piece for row in rows for piece in row]
        # All rows in one list: member m's i-th output is number i * size + m of the totals.
        own = slice(self.rank(), None, self.size())
        compute = reduction(operation, self._ranks, lambda index: index % self.size())
        return self._launch(kind, sent, sent, outputs, compute, lambda into, totals: fill(into, totals[own]))

    def _to_all(self, parts: Tensors, sent: Tensors, outputs: Tensors) -> c10d.Work:
        def deliver(into: Tensors, rows: list[Tensors]) -> None:
            fill(parts, [row[self.rank()] for row in rows])

        return self._launch("all_to_all", sent, sent, outputs, copies_of_all, deliver, compared=False)

    def _launch(
        self,
        kind: str,
        tensors: Tensors,
        sent: Tensors,
        into: Tensors,
        compute: Callable[[list[Tensors]], Any],
        deliver: Callable[[Tensors, Any], None],
        *,
        compared: bool = True,
    ) -> c10d.Work:
        """A collective of all: ``sent`` goes out, ``compute`` makes one result of all sent, ``deliver`` puts that ``into``."""
        said = MemberCall(f"{kind} {_what(tensors)}".rstrip(), (kind, _sizes(tensors) if compared else ()))
        token = self._record(kind, tensors, compared=compared)
        members = tuple(range(self.size()))
        exchange = self._table.join(self._launched, members, self.rank(), said, sent)
        self._launched += 1
        spoil(into, sent)
        return self._work(token, exchange, lambda: deliver(into, exchange.result(compute)), into or tensors)

    def _talk(self, kind: str, tensors: Tensors, pair: tuple[int, int], tag: int, into: Tensors) -> c10d.Work:
        said = MemberCall(f"{kind} {_what(tensors)}", _sizes(tensors))
        token = self._record_alone(kind, tensors)
        self._talks[pair, tag] += 1
        # The n-th send from one member to another with a tag meets the n-th receive; each of the two counts for itself.
        key = (*pair, tag, self._talks[pair, tag])
        exchange = self._table.join(key, pair, self.rank(), said, [] if into else tensors)
        self._count(pair, tag, tensors, received=bool(into))
        spoil(into, [])
        return self._work(token, exchange, lambda: fill(into, exchange.result(copies_of(0))), tensors)

    def _work(self, token: int, exchange: Exchange, finish: Callable[[], None], result: Tensors) -> c10d.Work:
        return LocalWork(self._scheduler, self._ranks[self.rank()], token, exchange, finish, result)


def _what(tensors: Tensors) -> str:
    return f"of {numel_of(tensors):,} {dtype_of(tensors)}" if tensors else ""


def _sizes(tensors: Tensors) -> tuple[tuple[str, int], ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)
