"""A process group whose members are all in this process, one at a time (see scheduler.py); reductions add in rank order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks import flight_recorder
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.sums import listed, operation_of, options
from pytest_fxbucket.ranks.single_process.exchange import (
    Exchange,
    ExchangeTable,
    Said,
    by_input,
    copies_of,
    copies_of_all,
    fill,
    in_a_row,
    reduction,
    require_whole,
    slices,
    spoil,
)
from pytest_fxbucket.ranks.single_process.scheduler import TurnScheduler

_Tensors = list[torch.Tensor]


class LocalWork(c10d.Work):
    """A collective under way. Its outputs are filled by this rank's own wait, and hold no numbers before."""

    def __init__(
        self, baton: TurnScheduler, rank: int, token: int, exchange: Exchange, finish: Callable[[], None], result: _Tensors
    ) -> None:
        super().__init__()
        self._baton, self._rank, self._token = baton, rank, token
        self._exchange, self._finish, self._result = exchange, finish, result
        self._finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the outputs are filled; raises Deadlock when they never can be. There is no time to run out."""
        flight_recorder.waits(self._token)
        self._baton.wait_until(self._rank, lambda: self._exchange.is_whole)
        self._finish_once()
        flight_recorder.waited(self._token)
        return True

    def synchronize(self) -> None:
        """The same as wait, as on other CPU works."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all members have come; then the outputs are filled. The others go on meanwhile."""
        if not self._exchange.is_whole:
            self._baton.pause(self._rank)
        if self._exchange.is_whole:
            self._finish_once()
        return self._finished

    def is_success(self) -> bool:
        """Whether the outputs are filled."""
        return self._finished

    def result(self) -> _Tensors:
        """The output tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[_Tensors]:
        """A future of the outputs, which waits here and now: who waits for it may do so where no other rank could go on."""
        self.wait()
        future: torch.futures.Future[_Tensors] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def _finish_once(self) -> None:
        if not self._finished:
            with torch.no_grad(), c10d.without_dispatch_modes():
                self._finish()
            self._finished = True


class LocalGroup(c10d.ProcessGroup):
    """One rank's end of a group of ``table``, as its number ``member``. Launches and waits are entered in the rank's ledger."""

    def __init__(self, name: str, table: ExchangeTable, member: int, baton: TurnScheduler) -> None:
        super().__init__(member, len(table.ranks))  # type: ignore[call-arg]  # only this one can be subclassed
        self._name, self._table, self._baton = name, table, baton
        self._global_rank = table.ranks[member]
        self._handle = flight_recorder.group(table.ranks)
        self._peers: int | None = None
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

    # Every method that torch lets a Python group override is here: see process_groups/ordered.py on those that are not.

    def allreduce(  # type: ignore[override]  # one signature for torch's overloads, here and below
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all members; ``opts`` are AllreduceOptions or an operation."""
        return self._all_reduce(listed(tensors), options(c10d.AllreduceOptions, opts or op))

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all members."""
        return self._all_reduce(list(tensors), options(c10d.AllreduceCoalescedOptions, opts))

    def reduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` over all members into the root's; ``opts`` are ReduceOptions or the root."""
        if opts is None or isinstance(opts, int):
            root = opts if root is None else root
            opts = options(c10d.ReduceOptions, op)
            opts.rootRank = root or 0
        return self._all_reduce(listed(tensors), opts, opts.rootRank, f"reduce to {opts.rootRank}")

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce ``inputs[i][m]`` (any sizes) over all members into member m's ``outputs[i]``."""
        return self._reduce_scatter(listed(outputs), _rows(inputs), opts or op)

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> c10d.Work:
        """Reduce the m-th of equal chunks of each input over all members into member m's output beside it."""
        return self._reduce_scatter(outputs, [sums.even_chunks(source, self.size()) for source in inputs], opts, inputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Reduce the m-th of equal chunks of ``source`` over all members into member m's ``output``."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> c10d.Work:
        """Gather each of ``inputs`` of all members, one after the other, into the output beside it."""
        for output, source in zip(outputs, inputs, strict=True):
            require_whole(output, source, self.size())
        return self._launch("all_gather", inputs, inputs, outputs, by_input, in_a_row)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Gather ``source`` of all members, one after the other, into ``output``."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, *args: Any, **named: Any
    ) -> c10d.Work:
        """Gather ``inputs[i]`` of member m into ``outputs[i][m]``, for all m."""
        into = [tensor for row in _rows(outputs) for tensor in row]
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
        sent = slices(source, input_sizes, self.size())
        return self._to_all(slices(output, output_sizes, self.size()), sent, [output])

    def alltoall(  # type: ignore[override]
        self, outputs: _Tensors, inputs: _Tensors, *args: Any, **named: Any
    ) -> c10d.Work:
        """Send ``inputs[m]`` to member m, whose piece for this one goes into ``outputs[m]``."""
        return self._to_all(list(outputs), list(inputs), outputs)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Copy the root's tensors to all members."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        both = listed(tensors)
        is_root = root == self.rank()
        sent, into = (both, []) if is_root else ([], both)
        compute = copies_of(root)
        return self._launch(f"broadcast of {root}", both, sent, into, compute, fill)

    def gather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Gather the one input of member m into the root's ``outputs[0][m]``, for all m."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        into = [tensor for row in _rows(outputs) for tensor in row] if root == self.rank() else []
        return self._launch(f"gather to {root}", listed(inputs), listed(inputs), into, by_input, fill)

    def scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, *args: Any, root: int = 0, **named: Any
    ) -> c10d.Work:
        """Send the root's ``inputs[0][m]`` to member m's one output."""
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        sent = [tensor for row in _rows(inputs) for tensor in row] if root == self.rank() else []
        compute = copies_of(root)
        own = self.rank()
        return self._launch(
            f"scatter of {root}",
            listed(outputs),
            sent,
            listed(outputs),
            compute,
            lambda into, copies: fill(into, [copies[own]]),
        )

    def barrier(self, *args: Any, **named: Any) -> c10d.Work:
        """Wait for all members."""
        return self._launch("barrier", [], [], [], lambda sent: [], fill)

    def send(  # type: ignore[override]
        self, tensors: Any, peer: int, tag: int = 0, *args: Any, **named: Any
    ) -> c10d.Work:
        """Send tensors to the group's number ``peer``; over once it has received them."""
        return self._talk(f"send to rank {self._table.ranks[peer]}", listed(tensors), (self.rank(), peer), tag, [])

    def recv(  # type: ignore[override]
        self, tensors: Any, peer: int, tag: int = 0, *args: Any, **named: Any
    ) -> c10d.Work:
        """Receive tensors from the group's number ``peer``."""
        into = listed(tensors)
        return self._talk(f"receive from rank {self._table.ranks[peer]}", into, (peer, self.rank()), tag, into)

    def recv_anysource(self, *args: Any, **named: Any) -> c10d.Work:
        """Not to be had: raises NotImplementedError."""
        raise NotImplementedError("back end local cannot receive from any rank; name the rank (src=...)")

    # The names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _all_reduce(self, tensors: _Tensors, opts: Any, owner: int | None = None, kind: str = "all_reduce") -> c10d.Work:
        operation = operation_of(opts, tensors)
        into = tensors if owner in (None, self.rank()) else []
        compute = reduction(operation, self._table.ranks, lambda index: owner)
        return self._launch(f"{kind}({operation.label})", tensors, tensors, into, compute, fill)

    def _reduce_scatter(self, outputs: _Tensors, rows: list[_Tensors], opts: Any, sources: _Tensors | None = None) -> c10d.Work:
        operation = operation_of(options(c10d.ReduceScatterOptions, opts), outputs)
        for output, row in zip(outputs, rows, strict=True):
            sums.require_same_size(output, row[self.rank()])
        sent = [piece for row in rows for piece in row]
        own = slice(self.rank(), None, self.size())
        return self._launch(
            f"reduce_scatter({operation.label})",
            sources or sent,
            sent,
            outputs,
            reduction(operation, self._table.ranks, lambda index: index % self.size()),
            lambda into, totals: fill(into, totals[own]),
        )

    def _to_all(self, parts: _Tensors, sent: _Tensors, outputs: _Tensors) -> c10d.Work:
        compute = copies_of_all
        own = self.rank()

        def deliver(into: _Tensors, rows: list[_Tensors]) -> None:
            fill(parts, [row[own] for row in rows])

        return self._launch("all_to_all", sent, sent, outputs, compute, deliver, compared=False)

    def _launch(
        self,
        kind: str,
        tensors: _Tensors,
        sent: _Tensors,
        into: _Tensors,
        compute: Callable[[list[_Tensors]], Any],
        deliver: Callable[[_Tensors, Any], None],
        *,
        compared: bool = True,
    ) -> c10d.Work:
        """A collective of all: ``sent`` goes out, ``compute`` makes one result of all sent, ``deliver`` puts that ``into``."""
        said = _said(kind, tensors, compared)
        token = flight_recorder.launch(self._handle, kind, _dtype(tensors), _numel(tensors), compared=compared)
        members = tuple(range(self.size()))
        exchange = self._table.join(self._launched, members, self.rank(), said, sent)
        self._launched += 1
        _spoil(into, sent)
        return self._work(token, exchange, lambda: deliver(into, exchange.result(compute)), into or tensors)

    def _talk(self, kind: str, tensors: _Tensors, pair: tuple[int, int], tag: int, into: _Tensors) -> c10d.Work:
        # Two members do not do the same here, so each keeps these in a group of its own.
        if self._peers is None:
            self._peers = flight_recorder.group((self._global_rank,))
        said = Said(f"{kind} {_what(tensors)}", _sizes(tensors))
        token = flight_recorder.launch(self._peers, kind, _dtype(tensors), _numel(tensors))
        self._talks[pair, tag] += 1
        key = (*pair, tag, self._talks[pair, tag])
        exchange = self._table.join(key, pair, self.rank(), said, [] if into else tensors)
        _spoil(into, [])
        return self._work(token, exchange, lambda: fill(into, exchange.result(copies_of(0))), tensors)

    def _work(self, token: int, exchange: Exchange, finish: Callable[[], None], result: _Tensors) -> c10d.Work:
        return LocalWork(self._baton, self._global_rank, token, exchange, finish, result)


def _rows(tensors: Any) -> list[_Tensors]:
    """Lists of tensors; one list may be given without its list."""
    return [list(tensors)] if tensors and isinstance(tensors[0], torch.Tensor) else [list(row) for row in tensors]


def _said(kind: str, tensors: _Tensors, compared: bool) -> Said:
    return Said(f"{kind} {_what(tensors)}".rstrip(), (kind, _sizes(tensors) if compared else ()))


def _spoil(into: _Tensors, sent: _Tensors) -> None:
    with torch.no_grad(), c10d.without_dispatch_modes():
        spoil(into, sent)


def _what(tensors: _Tensors) -> str:
    return f"of {_numel(tensors):,} {_dtype(tensors)}" if tensors else ""


def _sizes(tensors: _Tensors) -> tuple[tuple[str, int], ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)


def _dtype(tensors: _Tensors) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _numel(tensors: _Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)
