"""A process group over gloo whose reductions add in rank order, so that a bit depends on the ranks' values alone.

Or, where a job asks for it (sums.py), in that of a ring.

Gloo reduces in segments of a ring: the order in which an element is summed depends on its offset and on the size of the
message, so from three ranks on a bucketed reduction differs from separate ones. Here the ranks exchange their addends as bytes,
and each adds rank 0's, rank 1's, ... in the tensor's own dtype; an average is that sum divided by the number of ranks. What
does not reduce goes to gloo as it is. Tensors on a GPU are copied to the CPU first, summed there, and copied back by the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks import device, flight_recorder
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.sums import even_chunks, listed, operation_of, options, require_same_size

BACKEND = "ordered_gloo"


class OrderedWork(c10d.Work):
    """Exchanges in flight; the first wait (from any thread) runs ``finish``, which adds and fills the outputs.

    ``token`` is the launch's in the rank's ledger.
    """

    def __init__(self, token: int, exchanges: Sequence[Any], finish: Callable[[], None], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._token = token
        self._exchanges = exchanges
        self._finish = finish
        self._result = result
        self._lock = threading.Lock()
        self._finished = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the outputs are filled; raises RuntimeError as gloo does when a peer is gone."""
        flight_recorder.waits(self._token)
        for exchange in self._exchanges:
            exchange.wait() if timeout is None else exchange.wait(timeout)
        self._finish_once()
        flight_recorder.waited(self._token)
        return True

    def _finish_once(self) -> None:
        with self._lock, torch.no_grad(), c10d.without_dispatch_modes():
            if not self._finished:
                self._finish()
                self._finished = True

    def synchronize(self) -> None:
        """The same as wait, as on other CPU works."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the exchange is over (then wait returns at once)."""
        return self._finished or all(exchange.is_completed() for exchange in self._exchanges)

    def is_success(self) -> bool:
        """Whether the exchange ended without an error."""
        return self._finished or all(exchange.is_success() for exchange in self._exchanges)

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs, done once the additions are."""
        parts = torch.futures.collect_all([exchange.get_future() for exchange in self._exchanges])

        def complete(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for part in done.value():
                part.value()  # raises what gloo did; a wait here, in gloo's own thread, would never end
            self._finish_once()
            return self._result

        return parts.then(complete)


class OrderedGloo(c10d.ProcessGroup):
    """Gloo with reductions in rank order: reduce_scatter, all_reduce, reduce, and their tensor and coalesced forms.

    ``ranks`` are the members' global ranks. Each launch and wait is entered in the rank's ledger.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # only this one can be subclassed
        self._ranks = tuple(ranks) or tuple(range(size))
        self._handle = flight_recorder.group(self._ranks)
        # Two members do not do the same when they talk to one another, so each keeps that in a group of its own.
        self._peers = flight_recorder.group((self._ranks[rank],))
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._set_sequence_number_for_group()
        for kind in {"cpu", torch.device(device()).type}:
            self._register_backend(torch.device(kind), c10d.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)

    def allreduce(  # type: ignore[override]  # one signature for torch's overloads, here and below
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all ranks; ``opts`` are AllreduceOptions or an operation."""
        return self._all_reduce(listed(tensors), options(c10d.AllreduceOptions, opts or op))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> c10d.Work:
        """Reduce each of ``tensors`` in place over all ranks."""
        return self._all_reduce(list(tensors), options(c10d.AllreduceCoalescedOptions, opts))

    def reduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> c10d.Work:
        """Reduce each of ``tensors`` over all ranks into the root's; ``opts`` are ReduceOptions or the root."""
        if opts is None or isinstance(opts, int):
            root = opts if root is None else root
            opts = options(c10d.ReduceOptions, op)
            opts.rootRank = root or 0
        return self._all_reduce(listed(tensors), opts, opts.rootRank, "reduce")

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> c10d.Work:
        """Reduce ``inputs[i][r]`` (any sizes) over all ranks into rank r's ``outputs[i]``."""
        rows = [inputs] if isinstance(outputs, torch.Tensor) else inputs
        return self._reduce_scatter(listed(outputs), [list(row) for row in rows], opts or op)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Reduce the r-th of equal chunks of ``source`` over all ranks into rank r's ``output``."""
        return self._reduce_scatter([output], [even_chunks(source, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> c10d.Work:
        """As reduce_scatter_single for each pair."""
        return self._reduce_scatter(list(outputs), [even_chunks(source, self.size()) for source in inputs], opts)

    # The names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Below, what goes to gloo as it is. A method of torch's that a Python subclass may override but does not, launches with the
    # interpreter lock held (torch/csrc/distributed/c10d/PyProcessGroup.hpp); gloo's thread may want that lock with its queue
    # locked, to let go of a tensor, and both stand still for ever. So each such method is here.

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> c10d.Work:
        """Gather each of ``inputs`` of all ranks, one after the other, into the output beside it."""
        opts = opts or c10d.AllgatherOptions()
        token = self._launch("all_gather", inputs)
        ours = room_for(outputs)
        pairs = [pair for pair in zip(ours, on_cpu(inputs), strict=True) if pair[0].numel()]
        work = [self._gloo._allgather_base(*pair, opts) for pair in pairs]
        return OrderedWork(token, work, partial(bring_back, outputs, ours), outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> c10d.Work:
        """Gather ``source`` of all ranks, one after the other, into ``output``."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Gather into a list of tensors."""
        token = self._launch("all_gather", listed(inputs), compared=False)
        ours = room_for(outputs)
        return self._passed(token, self._gloo.allgather(ours, on_cpu(inputs), *args, **named), back=(outputs, ours))

    def all_to_all_single(  # type: ignore[override]
        self, output: torch.Tensor, source: torch.Tensor, *args: Any, **named: Any
    ) -> c10d.Work:
        """Exchange slices of one tensor."""
        token = self._launch("all_to_all", [source], compared=False)
        ours = room_for(output)
        work = self._gloo.alltoall_base(ours, on_cpu(source), *args, **named)
        return self._passed(token, work, [output], (output, ours))

    def barrier(self, *args: Any, **named: Any) -> c10d.Work:
        """Wait for all ranks."""
        return self._passed(self._launch("barrier", ()), self._gloo.barrier(*args, **named))

    def broadcast(self, tensors: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Copy the root's tensors to all ranks."""
        token = self._launch("broadcast", listed(tensors))
        ours = on_cpu(tensors)
        return self._passed(token, self._gloo.broadcast(ours, *args, **named), listed(tensors), (tensors, ours))

    def send(self, tensors: Any, peer: int, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Send tensors to the rank that is number ``peer`` of the group."""
        token = self._launch_to_peer(f"send to rank {self._ranks[peer]}", tensors)
        return self._passed(token, self._gloo.send(on_cpu(tensors), peer, *args, **named))

    def recv(self, tensors: Any, peer: int, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Receive tensors from the rank that is number ``peer`` of the group."""
        token = self._launch_to_peer(f"receive from rank {self._ranks[peer]}", tensors)
        ours = room_for(tensors)
        return self._passed(token, self._gloo.recv(ours, peer, *args, **named), listed(tensors), (tensors, ours))

    # The names before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _launch(self, kind: str, tensors: Sequence[torch.Tensor], *, compared: bool = True) -> int:
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        return flight_recorder.launch(self._handle, kind, dtype, sum(tensor.numel() for tensor in tensors), compared=compared)

    def _launch_to_peer(self, kind: str, tensors: Sequence[torch.Tensor]) -> int:
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        return flight_recorder.launch(self._peers, kind, dtype, sum(tensor.numel() for tensor in tensors))

    @staticmethod
    def _passed(token: int, work: Any, result: Sequence[torch.Tensor] = (), back: tuple[Any, Any] = ((), ())) -> c10d.Work:
        return OrderedWork(token, [work], partial(bring_back, *back), list(result))

    def _all_reduce(
        self, tensors: list[torch.Tensor], opts: Any, owner: int | None = None, kind: str = "all_reduce"
    ) -> c10d.Work:
        operation, add = operation_of(opts, tensors), sums.current()
        token = self._launch(f"{kind}({operation.label})", tensors)
        with torch.no_grad(), c10d.without_dispatch_modes():
            pairs = [(tensor, *self._gather(tensor)) for tensor in tensors if tensor.numel()]

        def finish() -> None:
            for tensor, received, _ in pairs if owner in (None, self.rank()) else ():
                parts = received.view(tensor.dtype).view(self.size(), -1).unbind()
                tensor.detach().copy_(add(parts, operation, self._ranks, owner).view(tensor.shape))

        return OrderedWork(token, [exchange for _, _, exchange in pairs], finish, tensors)

    def _gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        source = _as_bytes(tensor)
        received = torch.empty(self.size() * source.numel(), dtype=torch.uint8, device=source.device)
        return received, self._gloo._allgather_base(received, source, c10d.AllgatherOptions())

    def _reduce_scatter(self, outputs: list[torch.Tensor], rows: list[list[torch.Tensor]], opts: Any) -> c10d.Work:
        operation, add = operation_of(options(c10d.ReduceScatterOptions, opts), outputs), sums.current()
        with torch.no_grad(), c10d.without_dispatch_modes():
            for output, row in zip(outputs, rows, strict=True):
                require_same_size(output, row[self.rank()])
            token = self._launch(f"reduce_scatter({operation.label})", [piece for row in rows for piece in row])
            sent = [(output, *self._scatter(row)) for output, row in zip(outputs, rows, strict=True)]

        def finish() -> None:
            for output, received, _ in sent:
                parts = received.view(output.dtype).view(self.size(), -1).unbind()
                output.detach().copy_(add(parts, operation, self._ranks, self.rank()).view(output.shape))

        exchanges = [exchange for _, _, exchange in sent if exchange is not None]
        return OrderedWork(token, exchanges, finish, outputs)

    def _scatter(self, row: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        pieces = [_as_bytes(piece) for piece in row]
        own = pieces[self.rank()].numel()
        received = torch.empty(self.size() * own, dtype=torch.uint8, device=pieces[0].device)
        if not any(piece.numel() for piece in pieces):
            return received, None
        sizes = [piece.numel() for piece in pieces]
        exchange = partial(self._gloo.alltoall_base, received, torch.cat(pieces))
        return received, exchange([own] * self.size(), sizes, c10d.AllToAllOptions())


def join(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Make the default process group of this process one that adds in rank order."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world, timeout=timeout)


def join_plain_gloo(store: c10d.Store, rank: int, world: int, timeout: timedelta) -> None:
    """Make it one over gloo as it is, which is to be timed."""
    # Wrapped gloo stands still where it is launched with the interpreter lock held.
    c10d.leave_groups_unwrapped()
    c10d.gather_one_by_one()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _create(options: Any, _: object) -> OrderedGloo:
    return OrderedGloo(options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    ours: torch.Tensor = on_cpu(tensor.detach())
    flat = ours.contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element counts as contiguous whatever its stride


# Tensors on a GPU for a group that works on the CPU: copied there to be sent, and what arrives copied back.
#
# Containers may be nested lists; they come back as lists of the same nesting. A tensor on the CPU is its own stand-in.


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` needs a stand-in."""
    return tensor.device.type != "cpu"


def on_cpu(tensors: Any) -> Any:
    """Stand-ins with the tensors' values."""
    if isinstance(tensors, torch.Tensor):
        return tensors.detach().cpu() if is_staged(tensors) else tensors
    return [on_cpu(tensor) for tensor in tensors]


def room_for(tensors: Any) -> Any:
    """Stand-ins of the tensors' shapes and dtypes, to be filled."""
    if isinstance(tensors, torch.Tensor):
        return torch.empty(tensors.shape, dtype=tensors.dtype, device="cpu") if is_staged(tensors) else tensors
    return [room_for(tensor) for tensor in tensors]


def bring_back(tensors: Any, stand_ins: Any) -> None:
    """Copy stand-ins into the tensors that they stand for."""
    if not isinstance(tensors, torch.Tensor):
        for pair in zip(tensors, stand_ins, strict=True):
            bring_back(*pair)
    elif stand_ins is not tensors:
        tensors.detach().copy_(stand_ins)
