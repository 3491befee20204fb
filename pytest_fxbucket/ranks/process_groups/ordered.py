"""A process group over gloo whose reductions add in rank order, so that a bit depends on the ranks' values alone.

Or, where a job asks for it (sums.py), in that of a ring.

Gloo reduces in segments of a ring: the order in which an element is summed depends on its offset and on the size of the
message, so from three ranks on a bucketed reduction differs from separate ones. Here the ranks exchange their addends as bytes,
and each adds rank 0's, rank 1's, ... in the tensor's own dtype; an average is that sum divided by the number of ranks. What
does not reduce goes to gloo as it is. Tensors on a GPU are copied to the CPU first, summed there, and copied back by the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.compat import c10d
from pytest_fxbucket.ranks import device, flight_recorder
from pytest_fxbucket.ranks.flight_recorder import FROM_ANY
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.process_groups.base import (
    ReducingGroup,
    ReducingWork,
    Tensors,
    listed,
    require_contiguous,
    root_of,
)
from pytest_fxbucket.ranks.process_groups.sums import ReduceOperation

BACKEND = "ordered_gloo"


class OrderedWork(ReducingWork):
    """Exchanges in flight; ``finish`` adds what they bring."""

    def __init__(self, token: int, exchanges: Sequence[Any], finish: Callable[[], None], result: Tensors) -> None:
        super().__init__(token, finish, result)
        self._exchanges = exchanges

    def _arrive(self, timeout: timedelta | None) -> None:
        """Raises RuntimeError as gloo does when a peer is gone."""
        for exchange in self._exchanges:
            exchange.wait() if timeout is None else exchange.wait(timeout)

    def _source_rank(self) -> int:
        """Of a receive from any rank: whose message arrived."""
        (exchange,) = self._exchanges
        return int(exchange._source_rank())

    def is_completed(self) -> bool:
        """Whether the exchange is over (then wait returns at once)."""
        return self._finished or all(exchange.is_completed() for exchange in self._exchanges)

    def is_success(self) -> bool:
        """Whether the exchange ended without an error."""
        return self._finished or all(exchange.is_success() for exchange in self._exchanges)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs, done once the additions are."""
        parts = torch.futures.collect_all([exchange.get_future() for exchange in self._exchanges])

        def complete(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for part in done.value():
                part.value()  # raises what gloo did; a wait here, in gloo's own thread, would never end
            self._finish_once()
            return self._result

        return parts.then(complete)


class OrderedGloo(ReducingGroup):
    """Gloo with reductions in rank order: reduce_scatter, all_reduce, reduce, and their tensor and coalesced forms."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, ranks or range(size), name)
        # Entered now and not at the first send: that of the default group has to stay from job to job (flight_recorder.settle).
        self._recorded_alone = flight_recorder.group((self._ranks[rank],))
        self._gloo: Any = c10d.ProcessGroupGloo(store, rank, size, timeout)
        # As torch does with each gloo group that it makes.
        self._gloo._set_sequence_number_for_group()
        for kind in {"cpu", torch.device(device()).type}:
            self._register_backend(torch.device(kind), c10d.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)

    # Below, what goes to gloo as it is. A method of torch's that a Python subclass may override but does not, launches with the
    # interpreter lock held (torch/csrc/distributed/c10d/PyProcessGroup.hpp); gloo's thread may want that lock with its queue
    # locked, to let go of a tensor, and both stand still for ever. So each such method is here, or in base.py; torch 2.14 has
    # more of them than 2.13.

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> c10d.Work:
        """Gather each of ``inputs`` of all ranks, one after the other, into the output beside it."""
        opts = opts or c10d.AllgatherOptions()
        token = self._record("all_gather", inputs)
        ours = room_for(outputs)
        pairs = [pair for pair in zip(ours, on_cpu(inputs), strict=True) if pair[0].numel()]
        work = [self._gloo._allgather_base(*pair, opts) for pair in pairs]
        return OrderedWork(token, work, partial(bring_back, outputs, ours), outputs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Gather into a list of tensors."""
        token = self._record("all_gather", listed(inputs), compared=False)
        ours = room_for(outputs)
        return self._passed(token, self._gloo.allgather(ours, on_cpu(inputs), *args, **named), back=(outputs, ours))

    def all_to_all_single(  # type: ignore[override]
        self, output: torch.Tensor, source: torch.Tensor, *args: Any, **named: Any
    ) -> c10d.Work:
        """Exchange slices of one tensor. Raises ValueError for one with gaps or another order, which gloo would misread."""
        require_contiguous("all_to_all_single", output, source)
        token = self._record("all_to_all", [source], compared=False)
        ours = room_for(output)
        work = self._gloo.alltoall_base(ours, on_cpu(source), *args, **named)
        return self._passed(token, work, [output], (output, ours))

    def barrier(self, *args: Any, **named: Any) -> c10d.Work:
        """Wait for all ranks."""
        return self._passed(self._record("barrier", ()), self._gloo.barrier(*args, **named))

    def broadcast(self, tensors: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Copy the root's tensors to all ranks."""
        token = self._record(f"broadcast of {root_of(*args, **named)}", listed(tensors))
        ours = on_cpu(tensors)
        return self._passed(token, self._gloo.broadcast(ours, *args, **named), listed(tensors), (tensors, ours))

    def gather(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Gather into the root's lists of tensors."""
        token = self._record(f"gather to {root_of(*args, **named)}", listed(inputs))
        ours = room_for(outputs)
        return self._passed(token, self._gloo.gather(ours, on_cpu(inputs), *args, **named), back=(outputs, ours))

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Send each member its one of the root's tensors."""
        token = self._record(f"scatter of {root_of(*args, **named)}", listed(outputs))
        ours = room_for(outputs)
        return self._passed(token, self._gloo.scatter(ours, on_cpu(inputs), *args, **named), listed(outputs), (outputs, ours))

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **named: Any) -> c10d.Work:  # type: ignore[override]
        """Exchange lists of tensors, if gloo does."""
        token = self._record("all_to_all", listed(inputs), compared=False)
        ours = room_for(outputs)
        work = self._gloo.alltoall(ours, on_cpu(inputs), *args, **named)
        return self._passed(token, work, listed(outputs), (outputs, ours))

    def send(self, tensors: Any, peer: int, tag: int = 0) -> c10d.Work:
        """Send tensors to the rank that is number ``peer`` of the group."""
        token = self._record_alone(f"send to rank {self._ranks[peer]}", tensors)
        work = self._gloo.send(on_cpu(tensors), peer, tag)
        self._count((self.rank(), peer), tag, tensors, received=False)
        return self._passed(token, work)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> c10d.Work:
        """Receive tensors from the rank that is number ``peer`` of the group."""
        token = self._record_alone(f"receive from rank {self._ranks[peer]}", tensors)
        ours = room_for(tensors)
        work = self._gloo.recv(ours, peer, tag)
        self._count((peer, self.rank()), tag, tensors, received=True)
        return self._passed(token, work, listed(tensors), (tensors, ours))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> c10d.Work:
        """Receive tensors from the rank that sends first."""
        token = self._record_alone(FROM_ANY, tensors)
        ours = room_for(tensors)
        work = self._gloo.recv_anysource(ours, tag)

        def finish() -> None:
            self._count((work._source_rank(), self.rank()), tag, tensors, received=True)
            bring_back(tensors, ours)

        return OrderedWork(token, [work], finish, listed(tensors))

    @staticmethod
    def _passed(token: int, work: Any, result: Sequence[torch.Tensor] = (), back: tuple[Any, Any] = ((), ())) -> c10d.Work:
        return OrderedWork(token, [work], partial(bring_back, *back), list(result))

    def _all_reduce(self, kind: str, tensors: Tensors, operation: ReduceOperation, owner: int | None) -> c10d.Work:
        # The order of sums is taken at the launch; the wait adds. Every member gets all addends, for reduce too.
        add, token = sums.current(), self._record(f"{kind}({operation.label})", tensors)
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

    def _reduce_rows(self, kind: str, outputs: Tensors, rows: list[Tensors], operation: ReduceOperation) -> c10d.Work:
        add, token = sums.current(), self._record(kind, [piece for row in rows for piece in row])
        with torch.no_grad(), c10d.without_dispatch_modes():
            sent = [(output, *self._scatter(row)) for output, row in zip(outputs, rows, strict=True)]

        def finish() -> None:
            for output, received, _ in sent:
                parts = received.view(output.dtype).view(self.size(), -1).unbind()
                output.detach().copy_(add(parts, operation, self._ranks, self.rank()).view(output.shape))

        exchanges = [exchange for _, _, exchange in sent if exchange is not None]
        return OrderedWork(token, exchanges, finish, outputs)

    def _scatter(self, row: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        # Member m receives everybody's piece m and no other: an all-to-all, in which all send as much as one's own piece has.
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
    """Make the default process group of this process one over gloo as it is, to be timed."""
    # At TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the group, and wrapped gloo stands still if it is launched with the
    # interpreter lock held.
    c10d.leave_groups_unwrapped()
    c10d.gather_one_by_one()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def _create(options: Any, _: object) -> OrderedGloo:
    ranks: Sequence[int] = options.global_ranks_in_group
    return OrderedGloo(options.store, options.group_rank, options.group_size, options.timeout, ranks, options.group_id)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    ours: torch.Tensor = on_cpu(tensor.detach())
    flat = ours.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element counts as contiguous whatever its stride


# Tensors on a GPU in a group that works on the CPU: they are copied to the CPU to be sent, and what arrives is copied back.
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
