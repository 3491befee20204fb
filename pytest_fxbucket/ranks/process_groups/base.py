"""The methods of a process group that torch calls, for our groups, which reduce in an order of their own.

Torch's overloads, its old and new names, and options in all their forms lead to the few methods that a subclass defines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks import flight_recorder
from pytest_fxbucket.ranks.process_groups.sums import ReduceOperation, even_chunks, operation_of, require_same_size

Tensors = list[torch.Tensor]


def require_contiguous(kind: str, *tensors: torch.Tensor) -> None:
    """ValueError for one of ``tensors`` whose elements do not lie one after the other, which NCCL refuses, too."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} of a tensor of strides {tensor.stride()}; make it contiguous() first")


def require_whole(output: torch.Tensor, source: torch.Tensor, world: int) -> None:
    """ValueError if ``output`` cannot take ``source`` of ``world`` members."""
    if output.numel() != source.numel() * world or output.dtype != source.dtype:
        have, want = f"{output.numel():,} {dtype_of([output])}", f"{source.numel() * world:,} {dtype_of([source])}"
        raise ValueError(f"all_gather into an output of {have}, where {want} are due")


class ReducingWork(c10d.Work):
    """A collective under way; the first wait (from any thread) runs ``finish``, which fills the outputs, ``result``.

    ``token`` is the launch's in the rank's flight record.
    """

    def __init__(self, token: int, finish: Callable[[], None], result: Tensors) -> None:
        super().__init__()
        self._token, self._finish, self._result = token, finish, result
        self._lock = threading.Lock()
        self._finished = False

    def _arrive(self, timeout: timedelta | None) -> None:
        """Return once what ``finish`` needs is here."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs are filled; returns True, and raises what prevents that."""
        flight_recorder.waits(self._token)
        self._arrive(timeout)
        self._finish_once()
        flight_recorder.waited(self._token)
        return True

    def synchronize(self) -> None:
        """The same as wait, as on other CPU works."""
        self.wait()

    def result(self) -> Tensors:
        """The output tensors."""
        return self._result

    def _finish_once(self) -> None:
        # A future may finish this in the back end's thread while another thread waits. How the outputs are filled must not be
        # seen by autograd, nor by a dispatch mode of whoever waits.
        with self._lock, torch.no_grad(), c10d.without_dispatch_modes():
            if not self._finished:
                self._finish()
                self._finished = True


class ReducingGroup(c10d.ProcessGroup):
    """The group ``name`` of the global ``ranks``, as number ``member``. Each launch is entered in this rank's flight record."""

    def __init__(self, member: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(member, len(ranks))  # type: ignore[call-arg]  # only this one can be subclassed
        self._ranks = tuple(ranks)
        self._recorded: int = flight_recorder.group(self._ranks, name)
        self._recorded_alone: int | None = None

    def _all_reduce(self, kind: str, tensors: Tensors, operation: ReduceOperation, owner: int | None) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all members: ``reduce`` into that of number ``owner``, or ``all_reduce``."""
        raise NotImplementedError

    def _reduce_rows(self, kind: str, outputs: Tensors, rows: list[Tensors], operation: ReduceOperation) -> c10d.Work:
        """Reduce ``rows[i][m]`` over all members into member m's ``outputs[i]``."""
        raise NotImplementedError

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> c10d.Work:
        """Gather each of ``inputs`` of all members, one after the other, into the output beside it."""
        raise NotImplementedError

    def allreduce(  # type: ignore[override]  # one signature for torch's overloads, here and below
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all members; ``opts`` are AllreduceOptions or an operation."""
        return self._reduce("all_reduce", listed(tensors), _options(c10d.AllreduceOptions, opts or op))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all members."""
        return self._reduce("all_reduce", list(tensors), _options(c10d.AllreduceCoalescedOptions, opts))

    def reduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` over all members into the root's; ``opts`` are ReduceOptions or the root."""
        if opts is None or isinstance(opts, int):
            root = opts if root is None else root
            opts = _options(c10d.ReduceOptions, op)
            opts.rootRank = root or 0
        return self._reduce("reduce", listed(tensors), opts, opts.rootRank)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce ``inputs[i][m]`` (any sizes) over all members into member m's ``outputs[i]``."""
        return self._reduce_scatter(listed(outputs), rows_of(inputs), opts or op)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Reduce the m-th of equal chunks of ``source`` over all members into member m's ``output``."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> c10d.Work:
        """As reduce_scatter_single for each pair."""
        return self._reduce_scatter(list(outputs), [even_chunks(source, self.size()) for source in inputs], opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Gather ``source`` of all members, one after the other, into ``output``."""
        return self.all_gather_single_coalesced([output], [source], opts)

    # The names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(self, *args: Any, **named: Any) -> c10d.Work:
        """As all_gather_single_coalesced."""
        return self.all_gather_single_coalesced(*args, **named)

    def alltoall_base(self, *args: Any, **named: Any) -> c10d.Work:
        """As all_to_all_single."""
        return self.all_to_all_single(*args, **named)

    def _reduce(self, kind: str, tensors: Tensors, opts: Any, owner: int | None = None) -> c10d.Work:
        named = kind if owner is None else f"{kind} to {owner}"  # ranks that reduce to other roots part
        return self._all_reduce(named, tensors, operation_of(opts, tensors), owner)

    def _reduce_scatter(self, outputs: Tensors, rows: list[Tensors], opts: Any) -> c10d.Work:
        operation = operation_of(_options(c10d.ReduceScatterOptions, opts), outputs)
        for output, row in zip(outputs, rows, strict=True):
            require_same_size(output, row[self.rank()])
        return self._reduce_rows(f"reduce_scatter({operation.label})", outputs, rows, operation)

    def _record(self, kind: str, tensors: Sequence[torch.Tensor], *, compared: bool = True) -> int:
        """Enter a launch; its token."""
        return flight_recorder.launch(self._recorded, kind, dtype_of(tensors), numel_of(tensors), compared=compared)

    def _record_alone(self, kind: str, tensors: Sequence[torch.Tensor]) -> int:
        """Enter a send or a receive, on a recorded group of this member alone: the peer does the opposite, not the same."""
        if self._recorded_alone is None:
            self._recorded_alone = flight_recorder.group((self._ranks[self.rank()],))
        return flight_recorder.launch(self._recorded_alone, kind, dtype_of(tensors), numel_of(tensors))

    def _count(self, pair: tuple[int, int], tag: int, tensors: Sequence[torch.Tensor], *, received: bool) -> None:
        """Count a message between two members, sender and receiver, that this one sends or receives."""
        sender, receiver = (self._ranks[member] for member in pair)
        flight_recorder.message(sender, receiver, tag, dtype_of(tensors), numel_of(tensors), received=received)


def _options(kind: Any, given: Any) -> Any:
    """``given`` as options: they may be options already, a bare operation, or None."""
    if hasattr(given, "reduceOp"):
        return given
    opts = kind()
    if given is not None:
        opts.reduceOp = given
    return opts


def root_of(opts: Any = None, *_: Any, root: int = 0, **__: Any) -> int:
    """The root among arguments that follow a collective's tensors: in options, as a number, or by name."""
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", root))


def listed(tensors: Any) -> Tensors:
    """One tensor or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def rows_of(tensors: Any) -> list[Tensors]:
    """Lists of tensors; one list may be given without its list."""
    return [list(tensors)] if tensors and isinstance(tensors[0], torch.Tensor) else [list(row) for row in tensors]


def dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """The dtype of the first, without "torch."; "" of none."""
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def numel_of(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of all."""
    return sum(tensor.numel() for tensor in tensors)
