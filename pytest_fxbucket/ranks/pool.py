"""A pool of warm ranks: ``RankPool``, one for each world size and back end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from pytest_fxbucket.backends import BACKENDS
from pytest_fxbucket.ranks import stacks, wire
from pytest_fxbucket.ranks.conversation import Conversation
from pytest_fxbucket.ranks.failure import RankFailure, RankState, failure_of, has_failed
from pytest_fxbucket.ranks.launch import START_LIMIT_S, PoolProcesses, import_path, oom_kills
from pytest_fxbucket.ranks.machine import Lease, spread
from pytest_fxbucket.ranks.messages import Job, PoolRequest
from pytest_fxbucket.ranks.output import Output

Packed = TypeVar("Packed")

__all__ = ["Attempt", "RankFailure", "RankPool"]

LONGEST_S = 30.0 * 24 * 3600
"""A job's limit is cut to this. The ranks' process groups wait longer still (see worker.py): the parent's clock decides."""


@dataclass(frozen=True, slots=True)
class JobCall:
    """The arguments of RankPool.run as one value; ``task`` names the job in messages."""

    job: str
    payloads: Sequence[object]
    timeout_s: float
    paths: Sequence[str]
    log_dir: Path | None
    task: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """The outcome of one job by process: a state and the packed result of each, and whether all answered in time.

    ``outputs``: the end of what each rank printed; a process that plays several ranks has one for each.
    """

    states: list[RankState]
    results: list[list[wire.Buffer]]
    outputs: list[str]
    in_time: bool


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one job on all ranks; ``values`` gives what they returned, and raises RankError where it cannot."""

    states: list[RankState]
    in_time: bool
    values: Callable[[], list[object]]


class PoolKeeper(Protocol):
    """What a pool needs of the object that keeps all pools of a session."""

    def use(self, pool: RankPool) -> None:
        """Note that ``pool`` is at work now."""

    def fork(self, request: PoolRequest) -> PoolProcesses:
        """New processes for the pool at work. Raises RankError where they cannot be had."""

    def lease(self, world: int, backend: str, ranks_per_gpu: int) -> Lease:
        """GPUs for the pool at work. Raises RankError where there are too few."""


class RankPool:
    """The processes of one world, or of a part of it, warm from job to job (see ranks/worker.py for their side)."""

    def __init__(self, pools: PoolKeeper, request: PoolRequest) -> None:
        self.world, self.backend = request.world, request.backend
        self._pools, self._request = pools, request
        self._log_names = [[f"rank{rank}"] for rank in request.ranks]
        self._processes: PoolProcesses | None = None
        self._jobs = 0
        self._is_spent = False
        self._lease: Lease | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether this pool keeps GPUs."""
        return self._lease is not None

    @property
    def is_wanted(self) -> bool:
        """Whether another run waits for GPUs that this pool keeps."""
        return self._lease is not None and self._lease.is_wanted()

    @property
    def is_well(self) -> bool:
        """Whether all processes are alive and no job has left one of them useless to the next job."""
        return self._processes is not None and not self._is_spent and self._processes.is_whole()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty before the first run and after a failure."""
        return self._processes.pids if self._processes is not None else ()

    def run(
        self,
        job: str,
        payloads: Sequence[object],
        *,
        timeout_s: float,
        paths: Sequence[str] = (),
        log_dir: Path | None = None,
        what: str = "",
        on_output: Callable[[int, str], None] | None = None,
    ) -> list[object]:
        """Call ``job`` ("module:function") as function(rank, world, payloads[rank]) on each rank; results in rank order.

        ``paths`` go first on the ranks' sys.path, with this process's own path, directory and environment behind. Output goes
        to ``log_dir``/rank{r}.log, and its last 64 KiB go to ``on_output``(rank, text), for each rank that printed something,
        before this returns or raises. ``what`` names the task in messages. Payloads and results are pickled; tensors become
        copies. Raises RankFailure when a rank raises, dies, returns what cannot be pickled, when the ranks launched different
        collectives, or when not all have answered within ``timeout_s`` seconds; RankError when ranks cannot be started. After
        that the next run has fresh processes.
        """
        __tracebackhide__ = True  # the line that asked for the run is what helps
        if len(payloads) != self.world:
            raise ValueError(f"{len(payloads)} payloads for {self.world} ranks")
        # A job of ours says nothing that ``what`` does not.
        names = (what,) if what and job.startswith("pytest_fxbucket.") else (what, f"job {job}")
        call = JobCall(job, payloads, timeout_s, paths, log_dir, ", ".join(filter(None, names)))
        outcome = self._outcome(call)
        for state in outcome.states:
            if state.output and on_output is not None:
                on_output(state.rank, state.output)
        if not outcome.in_time or has_failed(outcome.states):
            self.close()
            raise self._failure(outcome, call)
        return outcome.values()

    def _outcome(self, call: JobCall) -> JobOutcome:
        attempt = self.attempt(call)
        values = partial(unpack_results, attempt.states, attempt.results, call.task)
        return JobOutcome(attempt.states, attempt.in_time, values)

    def _failure(self, outcome: JobOutcome, call: JobCall) -> RankFailure:
        return failure_of(outcome.states, task=call.task, timed_out_s=None if outcome.in_time else call.timeout_s)

    def attempt(self, call: JobCall, is_over: Callable[[], bool] | None = None) -> Attempt:
        """Run ``call`` on this pool's processes, one payload for each, and return how it went.

        ``is_over``: see Conversation.run.
        """
        try:
            frames = self._frames(call)
            self.start(is_over, call.job)
            return self._attempt(call, frames, is_over)
        except BaseException:
            # Whatever happened, Ctrl-C included, ranks in the middle of something are of no more use.
            self.close()
            raise

    def close(self) -> None:
        """Kill the ranks; the next run starts new ones. Idempotent."""
        processes, self._processes, self._is_spent = self._processes, None, False
        lease, self._lease = self._lease, None
        if processes is not None:
            processes.close()
        if lease is not None:
            lease.release()

    def start(self, is_over: Callable[[], bool] | None = None, job: str = "") -> None:
        """Start the ranks if none are up, and wait until they are in their group. Raises RankError if that fails or is over.

        The server imports the module of ``job`` before it forks if it is ours; a user's module may do anything when imported.
        ``is_over``: see Conversation.run.
        """
        if not self.is_well:
            self.close()
        self._pools.use(self)
        if self._processes is not None:
            return
        try:
            module = job.partition(":")[0] if job.startswith("pytest_fxbucket.") else ""
            self._processes = self._pools.fork(replace(self._on_its_gpus(), module=module))
            self._await_ready(self._processes, is_over)
        except BaseException:
            self.close()
            raise

    def _on_its_gpus(self) -> PoolRequest:
        if not BACKENDS[self.backend].gpus:
            return self._request
        self._lease = self._pools.lease(self.world, self.backend, self._request.ranks_per_gpu)
        return replace(self._request, gpus=spread(self._lease.gpus, len(self._request.ranks)))

    def _frames(self, call: JobCall) -> list[list[wire.Buffer]]:
        sys_path = tuple(import_path())
        self._jobs += 1
        order = wire.pack(Job(self._jobs, call.job, tuple(call.paths), sys_path, os.getcwd(), dict(os.environ)))
        packed: dict[int, list[wire.Buffer]] = {}
        for rank, payload in zip(self._request.ranks, call.payloads, strict=True):
            # Ranks that get the same object have it pickled once. ``call`` holds every payload, so no id is used again.
            if id(payload) not in packed:
                packed[id(payload)] = packed_payload(wire.pack, payload, rank, call.task)
        return [_frame(order) + _frame(packed[id(payload)]) for payload in call.payloads]

    def _attempt(self, call: JobCall, frames: list[list[wire.Buffer]], is_over: Callable[[], bool] | None) -> Attempt:
        processes = self._processes
        assert processes is not None
        output = Output(call.log_dir, self._log_names)
        try:
            # Before the job is sent, so that none of its entries is lost.
            for rank in range(self.world):
                processes.records.clear(rank)
            talk = Conversation(processes, self._jobs, frames, output, is_over)
            in_time = talk.run(time.monotonic() + min(call.timeout_s, LONGEST_S))
            for state in talk.states:
                state.where = processes.records.read(state.rank)
            # The results of such a job are good; ``start`` replaces the processes before the next one.
            self._is_spent = any(state.lost for state in talk.states)
            if not in_time or has_failed(talk.states):
                _look_at(processes, talk.states)
            outputs = output.tails()
            # A process that plays several ranks has one state here, and an output for each rank.
            for state, text in zip(talk.states, outputs, strict=False):
                state.output = text
            return Attempt(talk.states, talk.results, outputs, in_time)
        finally:
            output.close()

    def _await_ready(self, processes: PoolProcesses, is_over: Callable[[], bool] | None) -> None:
        # Nothing is sent: once it is in its group a rank says so unasked, with job number 0.
        talk = Conversation(processes, 0, [()] * len(processes.ranks), None, is_over)
        in_time = talk.run(time.monotonic() + START_LIMIT_S)
        if in_time and all(state.outcome == "ready" for state in talk.states):
            return
        _look_at(processes, talk.states)
        limit_s = None if in_time else START_LIMIT_S
        raise failure_of(talk.states, task=f"starting {self.world} ranks over {self.backend}", timed_out_s=limit_s)


def packed_payload(pack: Callable[[object], Packed], payload: object, rank: int, task: str) -> Packed:
    """``payload`` as ``pack`` makes it. Raises RankFailure for what cannot be sent."""
    try:
        return pack(payload)
    except wire.Unpicklable as error:
        raise _unpicklable(f"the payload for rank {rank} cannot be pickled: {error} ({task})", rank, error) from error


def _frame(buffers: list[wire.Buffer]) -> list[wire.Buffer]:
    return [wire.head(buffers), *buffers]


def _look_at(processes: PoolProcesses, states: Sequence[RankState]) -> None:
    """Add to ``states`` what can be seen from outside: exit statuses, the kernel's view, and stacks."""
    for index, state in enumerate(states):
        state.process = stacks.process_state(processes.pids[index])
        state.where = processes.records.read(state.rank)
    dead = [index for index, state in enumerate(states) if state.outcome == "died"]
    for index, status in processes.exit_statuses(dead).items():
        states[index].status = status
        # The kernel's counter names no process: a SIGKILL while it grew is taken for the kernel's.
        states[index].is_out_of_memory = status == -9 and oom_kills() > processes.oom_kills
    for index in dead:
        # What faulthandler wrote at a crash; SIGKILL leaves nothing.
        states[index].stack = stacks.read_from(processes.stack_files[index])
    alive = [index for index, state in enumerate(states) if state.outcome != "died"]
    found = stacks.collect_stacks([(processes.pids[i], processes.pidfds[i], processes.stack_files[i]) for i in alive])
    for index, stack in zip(alive, found, strict=True):
        states[index].stack = stack or stacks.NO_STACK


def unpack_results(states: Sequence[RankState], results: Sequence[Sequence[wire.Buffer]], task: str) -> list[object]:
    """What each of ``states`` returned. Raises RankFailure for what cannot be read."""
    values = []
    for state, buffers in zip(states, results, strict=True):
        try:
            values.append(wire.unpack(buffers))
        except wire.Unpicklable as error:
            text = f"the result of rank {state.rank} cannot be read: {error} ({task})"
            raise _unpicklable(text, state.rank, error) from error
    return values


def _unpicklable(text: str, rank: int, error: wire.Unpicklable) -> RankFailure:
    return RankFailure(text, "unpicklable", rank, (RankState(rank, "unpicklable", error=str(error)),))
