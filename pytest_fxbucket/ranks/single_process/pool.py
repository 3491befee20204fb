"""Pools whose ranks are all in one process: back ends ``local`` and ``fake``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from pytest_fxbucket.backends import Backend
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.desync import desyncs
from pytest_fxbucket.ranks.failure import RankFailure, RankState
from pytest_fxbucket.ranks.flight_recorder import RankPosition, ranks_text
from pytest_fxbucket.ranks.launch import threads_per_rank
from pytest_fxbucket.ranks.messages import PoolRequest
from pytest_fxbucket.ranks.pool import JobCall, JobOutcome, PoolKeeper, RankPool, packed_payload, unpack_results
from pytest_fxbucket.ranks.single_process.play import Answer, JobOrder
from pytest_fxbucket.ranks.stacks import process_state

# The frame that names a rank's thread in a dump, and the frame below which all their threads are alike.
_RANK = re.compile(r'scheduler\.py", line \d+ in rank_(\d+)$', re.M)
_JOB_BEGINS = re.compile(r'^  File "[^"]*play\.py", line \d+ in _called$', re.M)
# No letter of the kernel's, so that these ranks come last among those that may hold up the others.
_WAITS_ITS_TURN = "-"
_NEXT_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.M)


class SingleProcessPool(RankPool):
    """A pool of ``world`` ranks in one process that stays warm.

    Ranks that wait for each other for ever are a RankFailure of kind "deadlock", at once. Under ``fake`` the ranks run one
    after the other, up to the first that fails, and all output is rank 0's.
    """

    def __init__(self, pools: PoolKeeper, world: int, row: Backend) -> None:
        # One rank runs at a time, and may have all cores.
        super().__init__(pools, PoolRequest(world, threads_per_rank(1, os.environ), (0,), row.name))
        self._play = row.play
        self._takes_turns = row.has_values  # else each rank runs by itself, from its beginning to its end
        self._log_names = [[f"rank{rank}" for rank in range(world if self._takes_turns else 1)]]

    def _outcome(self, call: JobCall) -> JobOutcome:
        packed = [packed_payload(wire.pack_whole, payload, rank, call.task) for rank, payload in enumerate(call.payloads)]
        attempt = self.attempt(replace(call, job=self._play, payloads=[JobOrder(call.job, tuple(packed))]))
        (process,) = attempt.states
        if process.outcome != "returned":
            return JobOutcome(self._states_of_process(process, attempt.outputs), attempt.in_time, list)
        (answers,) = cast("list[list[Answer]]", unpack_results(attempt.states, attempt.results, call.task))
        states = [state for state, _ in answers]
        assert self._processes is not None
        for state in states:
            state.where = self._processes.records.read(state.rank)
            state.stack = _JOB_BEGINS.split(state.stack)[0]
        for state, output in zip(states, attempt.outputs, strict=False):  # under fake there is one for all
            state.output = output
        return JobOutcome(states, True, partial(unpack_results, states, [result for _, result in answers], call.task))

    def _failure(self, outcome: JobOutcome, call: JobCall) -> RankFailure:
        found = (_mismatch(outcome.states, call.task) or _deadlock(outcome.states, call.task)) if outcome.in_time else None
        failure = found or super()._failure(outcome, call)
        failure.has_processes = False
        return failure

    def _states_of_process(self, process: RankState, outputs: Sequence[str]) -> list[RankState]:
        """The states of all ranks if their process died or was late, which is put down to the rank that it played then."""
        assert self._processes is not None
        acting = self._processes.records.acting() or 0
        stacks = _by_rank(process.stack)
        letter, stack = _letter(self.pids[0], process.process), stacks.get(acting, process.stack)
        states = []
        for rank in range(self.world):
            where = self._processes.records.read(rank)
            printed = outputs[rank] if self._takes_turns else outputs[0] * (rank == acting)
            if rank == acting:
                states.append(replace(process, rank=rank, where=where, process=letter, stack=stack, output=printed))
                continue
            stack_of = stacks.get(rank, "")
            outcome = "returned" if not stack_of and self._is_through(rank, acting, where) else "running"
            states.append(RankState(rank, outcome, where=where, process=_WAITS_ITS_TURN, stack=stack_of, output=printed))
        return states

    def _is_through(self, rank: int, acting: int, where: RankPosition) -> bool:
        """Whether ``rank``, whose turn it is not and which has no stack, is taken for ended.

        Under ``local`` it is, unless its record has a wait at hand.
        """
        return bool(where.groups) and not where.waits if self._takes_turns else rank < acting


def _by_rank(stack: str) -> dict[int, str]:
    """The thread of each rank in a dump of all threads, down to where the job began."""
    threads = _NEXT_THREAD.split(stack)
    return {int(found[1]): _JOB_BEGINS.split(thread)[0] for thread in threads if (found := _RANK.search(thread))}


def _letter(pid: int, letter: str) -> str:
    """R if any thread of the process runs, else ``letter``, of its first thread, which only waits for the ranks'."""
    tasks = os.listdir(f"/proc/{pid}/task") if letter == "S" and os.path.exists(f"/proc/{pid}/task") else ()
    return "R" if any(process_state(int(task)) == "R" for task in tasks) else letter


def _mismatch(states: list[RankState], task: str) -> RankFailure | None:
    wrong = next((state for state in states if state.error_type == "CollectiveMismatch"), None)
    if wrong is None:
        return None
    # In the words of other back ends if the flight records show it, too: they have no sizes of collectives whose members may
    # have different ones.
    parted = [one for one in desyncs({state.rank: state.where for state in states}) if not one.is_missing]
    rank, sentence = (parted[0].rank, parted[0].sentence) if parted else (wrong.rank, wrong.error)
    return RankFailure(f"{sentence}{states[rank].place()} ({task})", "mismatch", rank, tuple(states))


def _deadlock(states: list[RankState], task: str) -> RankFailure | None:
    stuck = [state for state in states if state.outcome == "running"]
    if not stuck or any(state.outcome not in ("running", "returned") for state in states):
        return None
    parted = desyncs({state.rank: state.where for state in states})
    first, why = stuck[0].rank, _who_waits(stuck)
    if parted and states[parted[0].rank].outcome == "returned":
        first, why = parted[0].rank, parted[0].sentence
    sentence = f"no rank can go on: {why} ({task})"
    return RankFailure(sentence, "deadlock", first, tuple(states), tuple(one.sentence for one in parted))


def _who_waits(stuck: Sequence[RankState]) -> str:
    waits: dict[str, list[int]] = {}
    for state in stuck:
        waits.setdefault(state.where.text or "waits for a key of the store", []).append(state.rank)
    return "; ".join(f"{ranks_text(tuple(ranks))}: {what}" for what, ranks in waits.items())
