"""Back end ``local``: all ranks in one process, one at a time, so that runs are alike and nothing can hang for ever.

One job of the process plays them all: first what each rank is asked and what it tells, then the stage that they share.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.compat.threads import (
    Groups,
    leave_python_groups_unrecorded,
    let_python_groups_gather_into_given_tensors,
    put_groups,
    take_groups,
)
from pytest_fxbucket.process.state import ProcessState
from pytest_fxbucket.ranks import calling, flight_recorder, wire
from pytest_fxbucket.ranks.output import Outlets
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.single_process.exchange import Tables
from pytest_fxbucket.ranks.single_process.group import LocalGroup
from pytest_fxbucket.ranks.single_process.scheduler import LocalStore, TurnScheduler


@dataclass(frozen=True, slots=True)
class JobOrder:
    """Parent to process: call ``function`` ("package.module:function") as every rank.

    ``payloads`` has one packed payload a rank: each its own, or ranks would share the tensors.
    """

    function: str
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Process to parent, for one rank; the words of ``outcome`` are those of a RankState. ``result`` is packed."""

    outcome: str
    at: float = 0.0
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    stack: str = ""
    result: bytes = b""


def answer(order: JobOrder, rank: int) -> Answer:
    """Call the function as ``rank``, and say what it did."""
    told = _called(order, rank)
    if calling.is_twin():
        calling.end(rank, told.outcome, told.error_type, told.error, told.traceback)
    return told


def raised(error: BaseException) -> Answer:
    """An answer that tells of ``error``, without the frames through which a rank comes to its function."""
    told = calling.raised(error)
    return Answer("raised", time.monotonic(), told.error, told.error_type, told.traceback)


def _called(order: JobOrder, rank: int) -> Answer:
    try:
        function = calling.load(order.function)
        value = function(rank, len(order.payloads), wire.unpack([order.payloads[rank]]))
    except wire.Unpicklable as error:
        return Answer("unpicklable", time.monotonic(), f"its payload cannot be read ({error})")
    except BaseException as error:  # SystemExit from a user's code is a failure like any other
        return raised(error)
    try:
        return Answer("returned", time.monotonic(), result=wire.pack_whole(value))
    except wire.Unpicklable as error:
        text = f"its result, of type {type(value).__name__}, cannot be pickled ({error})"
        return Answer("unpicklable", time.monotonic(), text)


# What of a process's state a rank may take for its own, to be changed when the process goes on as another rank.
#
# Thread-local state (grad mode, autocast, the default device) needs no change, since each rank has a thread. Modules, and what
# they keep in their globals, are shared.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Process groups, and what all threads of a process share."""

    groups: Groups
    state: ProcessState

    @classmethod
    def take(cls) -> Surroundings:
        """Those of this process as they are now."""
        return cls(take_groups(), ProcessState.take())

    def put_back(self) -> None:
        """Let the process have these again."""
        put_groups(self.groups)
        self.state.put_back()


BACKEND = "fxbucket_local"


class _Stage:
    """What the ranks of one job share."""

    def __init__(self, world: int, outlets: Outlets) -> None:
        self.world = world
        self.baton = TurnScheduler(world, self._switch)
        self.tables = Tables()
        self.store = LocalStore(self.baton)
        self._outlets = outlets
        self.start = Surroundings.take()
        # Each rank begins as a fresh process would, but for the groups, which are its own to make.
        self._of_rank = [replace(self.start, groups=Groups()) for _ in range(world)]

    def enter(self, rank: int) -> None:
        """Let this process be ``rank``."""
        self._of_rank[rank].put_back()
        flight_recorder.act_as(rank)
        self._outlets.lead_to(rank)

    def leave(self) -> None:
        """Let this process be nobody again; forgets all groups."""
        self.start.put_back()
        flight_recorder.act_as(0)

    def group(self, name: str, ranks: tuple[int, ...], member: int) -> LocalGroup:
        """This rank's end of a new group; no ``ranks``: the default group, of all."""
        table = self.tables.sit_down(name, ranks or tuple(range(self.world)), member)
        return LocalGroup(name, table, member, self.baton)

    def _switch(self, old: int, new: int) -> None:
        self._of_rank[old] = Surroundings.take()
        self.enter(new)


_stage: _Stage | None = None


def run(rank: int, world: int, order: JobOrder) -> list[Answer]:
    """Call the order's function once as each rank; their answers, in rank order."""
    global _stage
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    let_python_groups_gather_into_given_tensors()
    leave_python_groups_unrecorded()
    sums.add_by()
    # What the module does to the process when it is imported must not stay with the rank that comes first. Where this fails, it
    # fails again in each rank, which says so.
    with contextlib.suppress(Exception):
        calling.load(order.function)
    world = len(order.payloads)
    with Outlets() as outlets:
        _stage = stage = _Stage(world, outlets)
        try:
            return _play(stage, order)
        finally:
            stage.leave()
            _stage = None


def _play(stage: _Stage, order: JobOrder) -> list[Answer]:
    answers = [Answer("running")] * stage.world
    threads = torch.get_num_threads()

    def part(rank: int) -> Callable[[], None]:
        def play() -> None:
            answers[rank] = _answer(stage, order, rank, threads)

        return play

    stage.enter(0)
    stage.baton.play([part(rank) for rank in range(stage.world)])
    stacks = stage.baton.stacks
    # Whatever such a rank made of it: it was stuck.
    return [Answer("running", stack=stacks[rank]) if rank in stacks else one for rank, one in enumerate(answers)]


def _answer(stage: _Stage, order: JobOrder, rank: int, threads: int) -> Answer:
    try:
        torch.set_num_threads(threads)
        # Backward passes stay on this thread, also those of a GPU: another could not tell for which rank it waits.
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group(BACKEND, store=stage.store, rank=rank, world_size=stage.world)
    except Exception as error:
        return raised(error)
    return answer(order, rank)


def _create(options: Any, _: object) -> LocalGroup:
    if _stage is None:
        raise RuntimeError(f"back end {BACKEND} has no ranks but in a job of its own")
    ranks: Sequence[int] = options.global_ranks_in_group
    return _stage.group(options.group_id, tuple(ranks), options.group_rank)
