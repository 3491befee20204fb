"""All pools of one pytest session: ``Pools``."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from pytest_fxbucket.backends import BACKENDS, PLACES, Backend, backend_named
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.launch import ForkServer, PoolProcesses, most_processes, threads_per_rank
from pytest_fxbucket.ranks.machine import Lease, take, this_machine
from pytest_fxbucket.ranks.messages import PoolRequest
from pytest_fxbucket.ranks.pool import RankPool

# A run waits this long for GPUs that others hold.
LEASE_LIMIT_S = 1800.0


class Pools:
    """The rank pools of one pytest session, and the fork server behind them, which imports modules ``warm`` for the ranks."""

    has_gpus = True
    """Whether its ranks may use GPUs, where there are some."""

    def __init__(self, warm: Sequence[str] = ()) -> None:
        self._owner = os.getpid()
        self._warm = tuple(warm)
        self._server: ForkServer | None = None
        self._pools: dict[tuple[int, str, int], RankPool] = {}
        self._alive: list[RankPool] = []  # in the order of their last use: the pool at work is the last
        self.say: Callable[[str], None] = lambda _: None
        """Called with a sentence that says what a run waits for."""

    def start(self) -> None:
        """Start the fork server, and return at once: it imports torch by itself. Call it from the main thread. Idempotent."""
        if self._server is not None and self._server.is_alive:
            return
        if self._server is not None:
            self._server.close()
        else:
            atexit.register(self.close)
        self._server = ForkServer(self._warm)

    def get(self, world: int, backend: str = "gloo", ranks_per_gpu: int = 0) -> RankPool:
        """The pool of ``world`` ranks; its processes start with the first run. Raises RankError for what cannot be had.

        ``ranks_per_gpu``: how many may share a GPU; 0: as many as must.
        """
        row = backend_named(backend)
        if not 1 <= world <= row.most_ranks:
            over = f" over {backend}" if row.play else ""
            raise RankError(f"a pool of {world} ranks{over}; expected 1 to {row.most_ranks}")
        self.start()
        key = world, backend, ranks_per_gpu if row.gpus else 0
        if key not in self._pools:
            self._pools[key] = self._new(world, row, ranks_per_gpu)
        return self._pools[key]

    def _new(self, world: int, row: Backend, ranks_per_gpu: int) -> RankPool:
        if row.play:
            from pytest_fxbucket.ranks.single_process.pool import SingleProcessPool

            return SingleProcessPool(self, world, row)
        threads = threads_per_rank(world, os.environ)
        ranks = tuple(range(world))
        return RankPool(self, PoolRequest(world, threads, ranks, row.name, ranks_per_gpu=ranks_per_gpu))

    def use(self, pool: RankPool) -> None:
        """Note that ``pool`` is at work now: where room is needed, the others are closed and not this one."""
        self._alive = [*(one for one in self._alive if one.pids and one is not pool), pool]

    def fork(self, request: PoolRequest) -> PoolProcesses:
        """New processes for the pool at work; where they would be too many, the pools that have waited longest end.

        Raises RankError when the server cannot start.
        """
        self.start()
        assert self._server is not None
        most = most_processes(os.environ)
        while len(self._alive) > 1 and len(request.ranks) + sum(len(one.pids) for one in self._alive) > most:
            self._alive.pop(0).close()
        try:
            return PoolProcesses(self._server, request)
        except RankError:
            self._end_server()
            raise

    def lease(self, world: int, backend: str, ranks_per_gpu: int) -> Lease:
        """GPUs for the pool at work. Raises RankError where there are too few, or others keep them for too long."""
        # Whether torch has CUDA is the ranks' business: as long as they make no tensors there they need none.
        row, machine = BACKENDS[backend], replace(this_machine(), has_cuda=True)
        if lacking := row.lacking(world, machine, ranks_per_gpu):
            raise RankError(lacking)
        count = row.gpus_to_lease(world, machine, ranks_per_gpu)
        places = PLACES if machine.exclusive else row.places_to_lease(-(-world // count), ranks_per_gpu)
        try:
            return take(count, machine.gpus, places=places, limit_s=0)
        except RankError:
            # A run that waits must hold no GPUs, or two runs could wait for each other.
            for pool in self._alive[:-1]:
                if pool.has_gpus:
                    pool.close()
        return take(count, machine.gpus, places=places, limit_s=LEASE_LIMIT_S, say=self.say)

    def give_back(self) -> None:
        """End the pools whose GPUs another run waits for. Call it where no pool is at work, as between tests."""
        for pool in self._alive:
            if pool.is_wanted:
                pool.close()

    def close(self) -> None:
        """End every rank and the server, and wait for it; idempotent."""
        # A forked copy of this process has the exit handler too, and must not end its parent's ranks.
        if os.getpid() != self._owner:
            return
        for pool in self._alive:
            pool.close()
        self._alive.clear()
        self._end_server()
        atexit.unregister(self.close)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
