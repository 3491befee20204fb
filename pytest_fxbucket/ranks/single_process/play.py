"""One process plays all ranks, each in its turn: in one job, which gets a payload and gives an answer for each rank.

``local``: ranks wait for each other, one running at a time, so that runs are alike and nothing can hang for ever. ``fake``: one
rank after the other, in groups that move no data; any number of them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.threads import (
    Groups,
    guard_devices,
    leave_python_groups_unrecorded,
    let_python_groups_gather_into_given_tensors,
    put_groups,
    take_groups,
)
from pytest_fxbucket.process.state import ProcessState, WarningFilters, put_torch_settings, torch_settings_now
from pytest_fxbucket.ranks import call_job, flight_recorder, wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.output import Outlets
from pytest_fxbucket.ranks.process_groups import sums
from pytest_fxbucket.ranks.single_process.group import LocalGroup, Tables
from pytest_fxbucket.ranks.single_process.scheduler import LocalStore, TurnScheduler


@dataclass(frozen=True, slots=True)
class JobOrder:
    """Parent to process: call ``function`` ("package.module:function") as every rank.

    ``payloads`` has one packed payload a rank: each its own, or ranks would share the tensors.
    """

    function: str
    payloads: tuple[bytes, ...]


Answer = tuple[RankState, call_job.Packed]
"""What became of one rank, and its result."""


def _answer(order: JobOrder, rank: int) -> Answer:
    return call_job.call(rank, partial(_called, order, rank), lambda value: [wire.pack_whole(value)])


def _called(order: JobOrder, rank: int) -> object:
    function = call_job.load(order.function)
    return function(rank, len(order.payloads), wire.unpack([order.payloads[rank]]))


def _import_first(order: JobOrder) -> None:
    """Import the job's module: what that does to the process must not stay with the rank that comes first."""
    with contextlib.suppress(Exception):  # it fails again in each rank, which says so
        call_job.load(order.function)


# State of the process that each rank takes for its own: it is exchanged when the process goes on as another rank.
#
# Thread-local state (grad mode, autocast, the default device) needs no change where each rank has a thread. Modules, and what
# they keep in their globals, are shared.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Process groups, and what all threads of a process share."""

    groups: Groups
    state: ProcessState
    streams: tuple[Any, Any, Any]
    filters: WarningFilters

    @classmethod
    def take(cls) -> Surroundings:
        """Those of this process as they are now."""
        return cls(take_groups(), ProcessState.take(), (sys.stdin, sys.stdout, sys.stderr), WarningFilters.take())

    def put_back(self) -> None:
        """Let the process have these again."""
        put_groups(self.groups)
        self.state.put_back()
        sys.stdin, sys.stdout, sys.stderr = self.streams
        self.filters.put_back()


BACKEND = "fxbucket_local"


class _Stage:
    """What the ranks of one job share, and the state of each rank whose turn it is not."""

    def __init__(self, world: int, outlets: Outlets) -> None:
        self.world = world
        self.scheduler = TurnScheduler(world, self._switch)
        self.tables = Tables()
        self.store = LocalStore(self.scheduler)
        self.threads = torch.get_num_threads()
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
        table = self.tables.table_of(name, ranks or tuple(range(self.world)), member)
        return LocalGroup(name, table, member, self.scheduler)

    def _switch(self, old: int, new: int) -> None:
        self._of_rank[old] = Surroundings.take()
        self.enter(new)


_stage: _Stage | None = None


def play_local(rank: int, world: int, order: JobOrder) -> list[Answer]:
    """Call the order's function once as each rank; their answers, in rank order. A rank that is stuck is "running"."""
    global _stage
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    let_python_groups_gather_into_given_tensors()
    leave_python_groups_unrecorded()
    guard_devices()
    sums.add_by()
    _import_first(order)
    world = len(order.payloads)
    answers: list[Answer] = [(RankState(one), []) for one in range(world)]
    with Outlets() as outlets:
        _stage = stage = _Stage(world, outlets)
        try:
            stage.enter(0)
            stage.scheduler.play([partial(_play_local, stage, order, answers, one) for one in range(world)])
        finally:
            stage.leave()
            _stage = None
    for stuck, stack in stage.scheduler.stacks.items():
        answers[stuck] = RankState(stuck, stack=stack), []  # whatever the rank made of Deadlock
    return answers


def _play_local(stage: _Stage, order: JobOrder, answers: list[Answer], rank: int) -> None:
    try:
        torch.set_num_threads(stage.threads)
        # Backward passes stay on this thread, also those of a GPU: another could not tell for which rank it waits.
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group(BACKEND, store=stage.store, rank=rank, world_size=stage.world)
    except Exception as error:
        answers[rank] = call_job.raised(rank, error), []
    else:
        answers[rank] = _answer(order, rank)


def play_fake(rank: int, world: int, order: JobOrder) -> list[Answer]:
    """Call the order's function once as each rank, up to the first that fails; answers in rank order."""
    _import_first(order)
    start, settings = Surroundings.take(), torch_settings_now()
    world = len(order.payloads)
    # A rank that was not begun counts as later than any that has failed.
    answers: list[Answer] = [(RankState(one, "was not begun", math.inf), []) for one in range(world)]
    for one in range(world):
        flight_recorder.act_as(one)
        try:
            with fake_world(one, world):
                answers[one] = _answer(order, one)
        finally:
            start.put_back()
            put_torch_settings(settings)  # also those of the thread, which is one for all ranks here
        if answers[one][0].outcome != "returned":
            break
    return answers


def _create(options: Any, _: object) -> LocalGroup:
    if _stage is None:
        raise RuntimeError(f"back end {BACKEND} has no ranks but in a job of its own")
    ranks: Sequence[int] = options.global_ranks_in_group
    return _stage.group(options.group_id, tuple(ranks), options.group_rank)
