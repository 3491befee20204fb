"""torch's pipeline schedules without ranks (``torch.distributed.pipelining.schedules``, in torch 2.11 to 2.15).

A schedule of several stages a rank builds the actions of all ranks in its constructor, which asks its stages for numbers only.
One of a single stage a rank has its order in the code that runs it: that runs here, on stages that note what is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from pytest_fxbucket.compat.c10d import group_alone, group_called


class ScheduleStep(NamedTuple):
    """One action of one rank, as torch orders it."""

    kind: str
    """torch's word: F, B, I, W, UNSHARD, RESHARD, REDUCE_GRAD, SEND_F, RECV_F, SEND_B, RECV_B, OVERLAP_F_B."""
    stage: int
    microbatch: int | None
    parts: tuple[ScheduleStep, ...] = ()
    batch: int | None = None
    """Number, on its rank, of the ``batch_isend_irecv`` that it is launched in."""


def schedule_class(name: str) -> type[Any]:
    """torch's class of the schedule ``name``."""
    found: type[Any] = schedules.get_schedule_class(name)
    return found


def has_one_stage_a_rank(name: str) -> bool:
    """Say whether the schedule has a single stage on each rank."""
    return issubclass(schedule_class(name), schedules.PipelineScheduleSingle)


def steps_of_ranks(name: str, stages: int, pp: int, microbatches: int) -> tuple[list[list[ScheduleStep]], Mapping[int, int]]:
    """The steps of each of ``pp`` ranks in order, and the rank of each stage. No process group is needed.

    Raises what the class raises for numbers that it cannot take.
    """
    made = schedule_class(name)
    if has_one_stage_a_rank(name):
        return [_run_alone(made, rank, stages, microbatches) for rank in range(pp)], {rank: rank for rank in range(pp)}
    numbers = [_Numbers(index, stages, 0, pp) for index in range(0, stages, pp)]
    schedule = made(numbers, microbatches)
    orders, ranks = schedule.pipeline_order_with_comms, schedule.stage_index_to_group_rank
    steps = [[_step(action) for action in orders[rank] if not _only_waits(action)] for rank in range(pp)]
    return steps, {stage: ranks[stage] for stage in range(stages)}


def _only_waits(action: Any) -> bool:
    """Whether ``action`` only waits for what another action began; torch has such actions from 2.15 on."""
    return str(action.computation_type.value).startswith("WAIT_")


def _step(action: Any) -> ScheduleStep:
    # An overlapped action has no stage and microbatch that mean anything: it gets those of its first part.
    parts = tuple(_step(part) for part in action.sub_actions or ())
    first = parts[0] if parts else ScheduleStep("", action.stage_index, action.microbatch_index)
    return ScheduleStep(action.computation_type.value, first.stage, first.microbatch, parts)


@dataclass
class _Numbers:
    """A stage that has what constructors of schedules read, which is numbers."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    submod: None = None
    stage_index_to_group_rank: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


class _Noted(NamedTuple):
    """Stands for a ``P2POp``: the send or receive, and the stage at its other end."""

    step: ScheduleStep
    peer: int


@dataclass
class _Noting(_Numbers):
    """A stage, alone on its rank, that notes what a running schedule asks of it."""

    steps: list[ScheduleStep] = field(default_factory=list)

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.steps.append(ScheduleStep("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.steps.append(ScheduleStep("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, *_: Any, **__: Any) -> None:
        self.steps.append(ScheduleStep("REDUCE_GRAD", self.stage_index, None))

    def get_fwd_recv_ops(self, microbatch: int) -> list[_Noted]:
        return self._transfers("RECV_F", microbatch, self.stage_index - 1)

    def get_fwd_send_ops(self, microbatch: int) -> list[_Noted]:
        return self._transfers("SEND_F", microbatch, self.stage_index + 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[_Noted]:
        return self._transfers("RECV_B", microbatch, self.stage_index + 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[_Noted]:
        return self._transfers("SEND_B", microbatch, self.stage_index - 1)

    def release_fwd_send_outputs(self, microbatch: int) -> None:
        """Since 2.15; nothing is held."""

    def _transfers(self, kind: str, microbatch: int, peer: int) -> list[_Noted]:
        there = 0 <= peer < self.num_stages
        return [_Noted(ScheduleStep(kind, self.stage_index, microbatch), peer)] if there else []


def _run_alone(made: type[Any], rank: int, stages: int, microbatches: int) -> list[ScheduleStep]:
    """The steps that the schedule's own code takes on ``rank``; nothing is computed and nothing sent."""
    stage = _Noting(rank, stages, rank, stages)
    schedule = made(stage, microbatches, loss_fn=_nothing)
    # Needs tensors, which a stage that only notes does not have. The assertion fails if torch renames one of them.
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        assert callable(getattr(schedule, name)), name
        setattr(schedule, name, _nothing)
    batches = 0

    def note(transfers: Sequence[_Noted], desc: str | None = None) -> list[Any]:
        nonlocal batches
        # As torch's ``_batch_p2p``: only sends together with receives are one ``batch_isend_irecv``.
        together = len({step.kind[:4] for step, _ in transfers}) > 1
        stage.steps += [step._replace(batch=batches if together else None) for step, _ in transfers]
        batches += together
        return []

    with patch.object(schedules, "_batch_p2p", note):
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.steps


def _nothing(*_: Any, **__: Any) -> None:
    pass


# The same schedules on ranks: torch's classes drive stages of our own, which compute and say what is sent and received.


class Transfer(NamedTuple):
    """A tensor on its way between two ranks."""

    kind: str
    """send or receive"""
    direction: str
    """forward or backward"""
    stage: int
    """The stage on this rank that sends or receives."""
    microbatch: int


class _Launch(dist.P2POp):
    of: Transfer | None


class _Launched(list[Any]):
    """Works that torch waits for together, with the transfers that they are of."""

    transfers: tuple[Transfer, ...] = ()


@contextmanager
def watched_waits(on_wait: Callable[[Sequence[Transfer]], AbstractContextManager[None]]) -> Iterator[None]:
    """In the block each wait of a running schedule for transfers of a :class:`RankStage` runs inside ``on_wait(transfers)``."""
    # A list of works does not say what it waits for, so a subclass of list carries that from the launch to the wait.
    launch, wait = schedules._batch_p2p, schedules._wait_batch_p2p

    def launched(transfers: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        works = _Launched(launch(transfers, desc))
        works.transfers = tuple(dict.fromkeys(one.of for one in transfers if isinstance(one, _Launch) and one.of is not None))
        return works

    def waited(works: list[Any]) -> None:
        if not isinstance(works, _Launched) or not works.transfers:
            wait(works)
            return
        with on_wait(works.transfers):
            wait(works)

    with patch.object(schedules, "_batch_p2p", launched), patch.object(schedules, "_wait_batch_p2p", waited):
        yield


class RankStage(_PipelineStageBase):
    """A stage of torch's schedules without a module: a subclass computes, and says what is sent and received."""

    def __init__(self, index: int, stages: int, device: str, group: str, places: Mapping[int, int]) -> None:
        """``group`` is the name of the process group, empty if this rank has all stages; ``places`` has the rank of each."""
        its = group_called(group) if group else group_alone()
        super().__init__(torch.nn.Module(), index, stages, torch.device(device), its)
        self.stage_index_to_group_rank = dict(places)
        self.args_recv_info = {0: ()}  # torch reads it to refuse transfers between stages that are no neighbours

    def sent(self, tensor: torch.Tensor, stage: int, of: Transfer | None = None) -> Any:
        """The launch that sends ``tensor``, contiguous, to ``stage``; ``of`` is what :func:`watched_waits` is told of it."""
        return self._launch(dist.isend, tensor, stage, of)

    def received(self, tensor: torch.Tensor, stage: int, of: Transfer | None = None) -> Any:
        """The launch that receives ``tensor``, contiguous, from ``stage``."""
        return self._launch(dist.irecv, tensor, stage, of)

    def _launch(self, operator: Callable[..., Any], tensor: torch.Tensor, stage: int, of: Transfer | None) -> Any:
        launch = _Launch(operator, tensor, self._rank_of(stage), self.group)
        launch.of = of
        return launch

    def _rank_of(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    # Nothing to prepare: torch's own stages learn shapes and connect to neighbours here, and ours know what crosses beforehand.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def schedule_on_ranks(name: str, stages: Sequence[RankStage], microbatches: int, unshard: Callable[[int], None]) -> Any:
    """torch's schedule ``name`` of this rank's ``stages``; if the schedule gathers parameters, it calls ``unshard(stage)``."""
    made, loss = schedule_class(name), _loss_as_it_is
    if has_one_stage_a_rank(name):
        return made(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    schedule = made(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    schedule.register_custom_function(schedules.UNSHARD, lambda action, _: unshard(action.stage_index))
    schedule.register_custom_function(schedules.RESHARD, _nothing)  # parameters are gathered once a step
    return schedule


def run_schedule(schedule: Any, microbatches: int) -> None:
    """Run one step of it."""
    # torch demands enabled gradients and a target tensor, though our stages compute gradients and the loss in graphs.
    with torch.enable_grad():
        schedule.step(target=torch.zeros(microbatches), return_outputs=False)


def _loss_as_it_is(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Give the loss as it is: the last stage has computed it."""
    return loss
