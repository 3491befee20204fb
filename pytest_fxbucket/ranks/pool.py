"""Pools of warm ranks: `Pools` for the session, a `RankPool` for each world size and backend."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import watchdog, wire
from pytest_fxbucket.ranks.failure import RankFailure, RankState, failure_of
from pytest_fxbucket.ranks.launch import MAX_RANKS, START_LIMIT_S, Crew, ForkServer, import_path
from pytest_fxbucket.ranks.messages import Job
from pytest_fxbucket.ranks.output import Output
from pytest_fxbucket.ranks.talk import Talk

__all__ = ["Pools", "RankFailure", "RankPool"]

BACKENDS = ("gloo",)


class RankPool:
    """`world` warm processes in one process group, whose default group reduces in rank order (see ranks/ordered.py)."""

    def __init__(self, pools: Pools, world: int, backend: str) -> None:
        self.world = world
        self.backend = backend
        self._pools = pools
        self._crew: Crew | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty before the first run and after a failure."""
        return self._crew.pids if self._crew is not None else ()

    def run(
        self,
        job: str,
        payloads: Sequence[object],
        *,
        timeout_s: float,
        paths: Sequence[str] = (),
        log_dir: Path | None = None,
        what: str = "",
    ) -> list[object]:
        """Call `job` ("package.module:function") as function(rank, world, payloads[rank]) on every rank; results in rank order.

        `paths` go first on the ranks' sys.path, with this process's own path, directory and environment behind. Output goes to
        `log_dir`/rank{r}.log. `what` names the task in messages. Payloads and results are pickled; tensors become plain copies.
        Raises RankFailure when a rank raises, dies, returns what cannot be pickled, or when not all have answered within
        `timeout_s` seconds; RankError when ranks cannot be started. After that the next run has fresh processes.
        """
        if len(payloads) != self.world:
            raise ValueError(f"{len(payloads)} payloads for {self.world} ranks")
        task = ", ".join(part for part in (what, f"job {job}") if part)
        frames = self._frames(job, payloads, paths, task)
        try:
            return self._run(frames, task, timeout_s, log_dir)
        except BaseException:
            # Whatever happened, Ctrl-C included, ranks in the middle of something are of no more use.
            self.close()
            raise

    def close(self) -> None:
        """Kill the ranks; the next run starts new ones. Idempotent."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def start(self) -> None:
        """Have the ranks up and in their group. Raises RankError when that fails."""
        if self._crew is not None and not self._crew.is_whole():
            self.close()
        if self._crew is not None:
            return
        self._crew = self._pools.fork(self.world)
        try:
            self._await_ready(self._crew)
        except BaseException:
            self.close()
            raise

    def _frames(self, job: str, payloads: Sequence[object], paths: Sequence[str], task: str) -> list[list[wire.Buffer]]:
        sys_path = tuple(import_path())
        order = wire.pack(Job(job, tuple(paths), sys_path, os.getcwd(), dict(os.environ)))
        packed: dict[int, list[wire.Buffer]] = {}
        for rank, payload in enumerate(payloads):
            if id(payload) not in packed:
                packed[id(payload)] = _pack_payload(payload, rank, task)
        return [_frame(order) + _frame(packed[id(payload)]) for payload in payloads]

    def _run(self, frames: list[list[wire.Buffer]], task: str, timeout_s: float, log_dir: Path | None) -> list[object]:
        self.start()
        crew = self._crew
        assert crew is not None
        output = Output(log_dir, self.world)
        try:
            for rank in range(self.world):
                crew.slots.clear(rank)
            talk = Talk(crew, frames, output)
            in_time = talk.run(time.monotonic() + timeout_s)
            if not in_time or any(state.outcome != "returned" for state in talk.states):
                _look_at(crew, talk.states, output, stacks=not in_time)
                raise failure_of(talk.states, task=task, timed_out_s=None if in_time else timeout_s)
            results = _results(talk, task)
        finally:
            output.close()
        if len(set(talk.collectives)) > 1:
            # A collective that only some ranks launched would meet another job's.
            self.close()
        return results

    def _await_ready(self, crew: Crew) -> None:
        talk = Talk(crew, [()] * self.world, None)
        in_time = talk.run(time.monotonic() + START_LIMIT_S)
        if in_time and all(state.outcome == "ready" for state in talk.states):
            return
        _look_at(crew, talk.states, None, stacks=not in_time)
        limit_s = None if in_time else START_LIMIT_S
        raise failure_of(talk.states, task=f"starting {self.world} ranks over {self.backend}", timed_out_s=limit_s)


class Pools:
    """The rank pools of one pytest session, and the fork server behind them."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._server: ForkServer | None = None
        self._pools: dict[tuple[int, str], RankPool] = {}

    def start(self) -> None:
        """Start the fork server, and return at once: it imports torch by itself. Call it from the main thread. Idempotent."""
        if self._server is not None and self._server.is_alive:
            return
        if self._server is not None:
            self._server.close()
        else:
            atexit.register(self.close)
        self._server = ForkServer()

    def get(self, world: int, backend: str = "gloo") -> RankPool:
        """The pool of `world` ranks; its processes start with the first run. Raises RankError for what cannot be had."""
        if backend not in BACKENDS:
            raise RankError(f'no ranks for backend "{backend}"; expected {" or ".join(BACKENDS)}')
        if not 1 <= world <= MAX_RANKS:
            raise RankError(f"a pool of {world} ranks; expected 1 to {MAX_RANKS}")
        self.start()
        return self._pools.setdefault((world, backend), RankPool(self, world, backend))

    def fork(self, world: int) -> Crew:
        """New processes for a pool. Raises RankError when the server cannot start."""
        self.start()
        assert self._server is not None
        try:
            return Crew(self._server, world)
        except RankError:
            self._end_server()
            raise

    def close(self) -> None:
        """End every rank and the server, and wait for it; idempotent."""
        if os.getpid() != self._owner:
            return
        for pool in self._pools.values():
            pool.close()
        self._end_server()
        atexit.unregister(self.close)

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _pack_payload(payload: object, rank: int, task: str) -> list[wire.Buffer]:
    try:
        return wire.pack(payload)
    except wire.Unpicklable as error:
        text = f"the payload for rank {rank} cannot be pickled: {error} ({task})"
        raise RankFailure(text, kind="unpicklable", rank=rank, error=str(error)) from error


def _frame(buffers: list[wire.Buffer]) -> list[wire.Buffer]:
    return [wire.head(buffers), *buffers]


def _look_at(crew: Crew, states: Sequence[RankState], output: Output | None, *, stacks: bool) -> None:
    """Add to `states` what can be seen from outside: exit statuses, marks, the kernel's view, output, and stacks."""
    for state in states:
        state.process = watchdog.process_state(crew.pids[state.rank])
        state.mark = crew.slots.read(state.rank)
        state.output = output.tail(state.rank) if output is not None else ""
    dead = [state.rank for state in states if state.outcome == "died"]
    for rank, status in crew.exit_statuses(dead).items():
        states[rank].status = status
    for rank in dead:
        states[rank].stack = watchdog.read_from(crew.stack_files[rank])
    if stacks:
        alive = [state.rank for state in states if state.outcome != "died"]
        found = watchdog.collect_stacks([(crew.pids[r], crew.pidfds[r], crew.stack_files[r]) for r in alive])
        for rank, stack in zip(alive, found, strict=True):
            states[rank].stack = stack


def _results(talk: Talk, task: str) -> list[object]:
    results = []
    for rank, buffers in enumerate(talk.results):
        try:
            results.append(wire.unpack(buffers))
        except wire.Unpicklable as error:
            text = f"the result of rank {rank} cannot be read: {error} ({task})"
            raise RankFailure(text, kind="unpicklable", rank=rank, error=str(error)) from error
    return results
