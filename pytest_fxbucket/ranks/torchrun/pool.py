"""Pools of which each pytest process holds one rank, as torchrun gave it; results and failures are the same everywhere."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from pytest_fxbucket.backends import BACKENDS
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.failure import RankFailure, RankState, has_failed
from pytest_fxbucket.ranks.launch import START_LIMIT_S, threads_per_rank
from pytest_fxbucket.ranks.messages import PoolRequest, StoreAddress
from pytest_fxbucket.ranks.pool import LONGEST_S, Attempt, JobCall, JobOutcome, RankPool, unpack_results
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.ranks.torchrun import store
from pytest_fxbucket.ranks.torchrun.member import ItemProgress
from pytest_fxbucket.ranks.torchrun.rendezvous import GONE, Rendezvous, RendezvousRound
from pytest_fxbucket.ranks.wire import line_of

# A job's ranks may end at its very limit, and are looked at for their stacks after that.
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class _Coming:
    """What a process is about to run. ``group``: the topic at which its living rank's group was made; "" if it has none."""

    job: str
    world: int
    backend: str
    group: str


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    """What became of one process's rank: ``problem`` says why it could not be started.

    ``state`` beside a problem: of a rank that raised what looks as if it had only lost a peer. ``is_effect``: somebody else
    had failed before the problem came up.
    """

    state: RankState | None
    result: object
    in_time: bool
    problem: str = ""
    is_effect: bool = False


class TorchrunPools(Pools):
    """As Pools, for a process that holds one rank of each world over gloo.

    Worlds in one process (``local``, ``fake``) are run by each process for itself: all come to the same result unasked.
    """

    has_gpus = False

    def __init__(self, meeting: Rendezvous, progress: ItemProgress, warm: Sequence[str] = ()) -> None:
        super().__init__(warm=warm)
        self.meeting, self.progress = meeting, progress
        self._rank_pools: dict[tuple[int, str], TorchrunPool] = {}

    def get(self, world: int, backend: str = "gloo", ranks_per_gpu: int = 0) -> RankPool:
        """The pool of the first ``world`` of torchrun's ranks. Raises RankError for more than these, or another back end."""
        __tracebackhide__ = True
        row = BACKENDS.get(backend)
        if row is not None and row.play:
            return super().get(world, backend)
        if row is None or row.gpus:
            raise RankError(
                f'no ranks for backend "{backend}" under torchrun; expected gloo, local or fake (--fxbucket-backend=gloo)'
            )
        if not 1 <= world <= self.meeting.world:
            raise RankError(
                f"{world} ranks are needed and torchrun started {self.meeting.world}; start as many with --nnodes and "
                "--nproc-per-node, or let fewer run (run.world in a plan)"
            )
        self.start()
        return self._rank_pools.setdefault((world, backend), TorchrunPool(self, world, backend))


class TorchrunPool(RankPool):
    """One rank of a world whose other ranks are other processes' (``rank >= world``: none, and this one listens only).

    Every process of the meeting must run the same job at the same time: who has not come within ``timeout_s`` seconds fails it
    for all. Results and output are those of all ranks.
    """

    def __init__(self, pools: TorchrunPools, world: int, backend: str) -> None:
        self._torchrun_pools, self._meeting = pools, pools.meeting
        member = pools.meeting.member
        threads = threads_per_rank(min(world, member.local_world), os.environ)
        super().__init__(pools, PoolRequest(world, threads, (member.rank,), backend))
        self._log_names = [[member.name]]
        self._is_player = member.rank < world
        self._group = ""

    def _outcome(self, call: JobCall) -> JobOutcome:
        __tracebackhide__ = True
        topic = self._torchrun_pools.progress.run()
        self._come_together(f"{topic}.come", call)
        # A group that is named after this topic is new: its ranks are started first, within a limit of their own.
        limit_s = min(call.timeout_s, LONGEST_S) + _LOOK_S + (START_LIMIT_S if self._group == f"{topic}.come" else 0)
        latest = time.monotonic() + limit_s
        done = self._play(topic, call) if self._is_player else None
        said = self._meeting.exchange(f"{topic}.done", done, limit_s=latest - time.monotonic())
        try:
            return self._judge(said)
        except BaseException:
            self.close()
            raise

    def _come_together(self, topic: str, call: JobCall) -> None:
        """Have all processes at the same job, with ranks of one process group or all without."""
        __tracebackhide__ = True
        group = self._group if self.is_well else ""
        came = self._meeting.exchange(topic, _Coming(call.job, self.world, self.backend, group), limit_s=call.timeout_s)
        if came.missing:
            self._meeting.was_left = True
            absent = "; ".join(f"{self._meeting.who(rank)} {why}" for rank, why in sorted(came.missing.items()))
            raise RankError(f"the ranks could not begin: {absent} ({call.task})")
        said = cast("dict[int, _Coming]", came.entries)
        for rank, one in said.items():
            if _wants(one) != _wants(said[0]):
                who = self._meeting.who(rank)
                raise RankError(
                    f"the processes do not run the same: {who} {_wants(one)}, rank 0 {_wants(said[0])} ({call.task})"
                )
        # All read the same round and decide alike: the ranks are kept if they are in one group, else all are started anew.
        groups = {said[rank].group for rank in range(self.world)}
        if len(groups) > 1 or "" in groups:
            self.close()
            self._group = topic

    def _play(self, topic: str, call: JobCall) -> MemberOutcome:
        """Run the job on this process's rank; whatever comes of it, the others learn that it failed at once."""
        __tracebackhide__ = True
        meeting, alarm = self._meeting, f"{topic}.done"
        meet_at = StoreAddress(
            meeting.member.host, meeting.member.port, f"{meeting.store_prefix}/group.{self._group}", meeting.is_on_one_machine
        )
        self._request = replace(self._request, store=meet_at)
        start = time.monotonic()
        try:
            attempt = self.attempt(replace(call, payloads=[call.payloads[meeting.rank]]), lambda: meeting.is_alarmed(alarm))
        except RankError as error:
            # Asked before our own alarm, which ends the waiting of all others at once.
            is_effect = meeting.is_alarmed(alarm)
            meeting.alarm(alarm)
            problem, lost = str(error), None
            if isinstance(error, RankFailure):
                problem = "\n".join(error.lines())
                lost = next((replace(one, at=time.monotonic() - start) for one in error.states if one.is_effect), None)
            return MemberOutcome(lost, None, True, problem, is_effect)
        except BaseException:
            with contextlib.suppress(RankError):
                meeting.alarm(alarm)
            raise
        (state,), result = attempt.states, None
        if attempt.in_time and state.outcome == "returned":
            result = _plain_result(attempt, state)
        if not attempt.in_time or has_failed(attempt.states):
            meeting.alarm(alarm)
        # Counted from the beginning of the job, the one moment that the clocks of two machines have in common.
        state.at = max(0.0, state.at - start)
        return MemberOutcome(state, result, attempt.in_time)

    def _judge(self, said: RendezvousRound) -> JobOutcome:
        """The outcome by what all processes said, which is the same on each of them."""
        __tracebackhide__ = True
        done = {rank: one for rank, one in said.entries.items() if isinstance(one, MemberOutcome)}
        states = [self._state(rank, done, said) for rank in range(self.world)]
        if (unstarted := not_started(done, states)) is not None:
            rank, problem = unstarted
            raise RankError(f"{self._meeting.who(rank)}: {problem}")

        def values() -> list[object]:
            if said.missing:
                self.close()
                raise RankError("; ".join(f"{self._meeting.who(rank)} {why}" for rank, why in said.missing.items()))
            return [done[rank].result for rank in range(self.world)]

        return JobOutcome(states, all(one.in_time for one in done.values()), values)

    def _state(self, rank: int, done: dict[int, MemberOutcome], said: RendezvousRound) -> RankState:
        if rank in done and (state := done[rank].state) is not None:
            return state
        why = said.missing.get(rank) or said.missing.get(0, "did not say what became of it")
        # A rank that is gone counts as the first to fail. One that left did so because of another, or is late.
        return RankState(rank, "gone", 0.0 if why.startswith(GONE) else math.inf, why.removeprefix(GONE))


def not_started(done: Mapping[int, MemberOutcome], states: Sequence[RankState]) -> tuple[int, str] | None:
    """A rank that could not be started, and why; None if there is none, or if the known failure of a peer explains each."""
    began = [state for state in states if not (state.rank in done and done[state.rank].problem)]
    is_cause_known = any(state.outcome not in ("returned", "running") and not state.is_effect for state in began)
    # Problems of a rank's own come before effects of another's. Where a cause is known, effects tell nothing.
    problems = [
        (one.is_effect or one.state is not None, rank)
        for rank, one in done.items()
        if one.problem and not (one.state is not None and is_cause_known)
    ]
    _, rank = min(problems, default=(False, None))
    return None if rank is None else (rank, done[rank].problem)


def _plain_result(attempt: Attempt, state: RankState) -> object:
    """What this process's rank returned, if others may read it; or else its state says why not."""
    try:
        (result,) = unpack_results(attempt.states, attempt.results, "")
        store.pack(result)
    except (RankFailure, store.NotPlainDataError) as error:
        state.outcome, state.error = (
            "unpicklable",
            f"its result has {line_of(error)}, and only plain data goes to other machines",
        )
        return None
    return result


def _wants(one: _Coming) -> str:
    return f"runs {one.job} on {one.world} ranks over {one.backend}"
