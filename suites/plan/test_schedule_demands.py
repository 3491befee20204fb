"""What a plan knows of schedules is what torch's own classes make of stages, ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from pytest_fxbucket.plan.pipeline_schedules import (
    SCHEDULES,
    fits_ranks,
    fitting_ranks,
    microbatches_problem,
    rank_of_stage,
)

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16)


def stage_of_torch(stage: int, stages: int, pp: int) -> Any:
    """What a schedule's table is made of: a stage's numbers, without the process group that a real one asks for."""
    return SimpleNamespace(
        stage_index=stage, num_stages=stages, group_size=pp, group_rank=0, submod=torch.nn.Identity(), is_first=stage == 0,
        is_last=stage == stages - 1, has_backward=True, device=torch.device("cpu"), group=None, stage_index_to_group_rank=None,
    )  # fmt: skip


def built(schedule: str, stages: int, pp: int, microbatches: int, held: Sequence[int] = ()) -> Any:
    """torch's own schedule of rank 0, which holds what a plan says or `held`; raises ValueError where it refuses."""
    held = held or [stage for stage in range(stages) if rank_of_stage(schedule, stages, pp, stage) == 0]
    mine = [stage_of_torch(stage, stages, pp) for stage in held]
    cls: Any = get_schedule_class(schedule)
    return cls(mine if issubclass(cls, PipelineScheduleMulti) else mine[0], microbatches)


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_are_refused_where_torch_refuses_them(schedule: str, pp: int) -> None:
    for stages in [stages for stages in range(1, 9) if fits_ranks(schedule, stages, pp)]:
        for microbatches in COUNTS:
            problem = microbatches_problem(schedule, microbatches, stages, pp)
            if not problem:
                built(schedule, stages, pp, microbatches)
                continue
            with pytest.raises(ValueError, match="microbatches"):
                built(schedule, stages, pp, microbatches)
            built(schedule, stages, pp, int(problem.rpartition("; use ")[2]))


@pytest.mark.parametrize("schedule", [name for name, holds in SCHEDULES.items() if holds != "one"])
def test_stages_are_on_the_ranks_that_torch_has_them_on(schedule: str) -> None:
    for stages in range(1, 13):
        for pp in fitting_ranks(schedule, stages):
            made = built(schedule, stages, pp, 24)
            ours = {stage: rank_of_stage(schedule, stages, pp, stage) for stage in range(stages)}
            assert made.stage_index_to_group_rank == ours
            table = {
                action.stage_index: rank
                for rank, actions in made.pipeline_order.items()
                for one in actions
                if one is not None
                for action in one.sub_actions or (one,)
            }
            assert table == ours


def test_other_numbers_of_stages_are_refused_where_torch_has_two_on_each_rank() -> None:
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        assert [stages for stages in range(1, 9) if fits_ranks(schedule, stages, 2)] == [4]
        with pytest.raises(ValueError, match="exactly 2 stages per rank"):
            built(schedule, 6, 2, 12, held=[0, 2, 4])


def test_ranks_that_fit_are_found_from_the_stages() -> None:
    assert fitting_ranks("1F1B", 4) == [4]
    assert fitting_ranks("LoopedBFS", 6) == [1, 2, 3, 6]
    assert fitting_ranks("DualPipeV", 6) == [3]
    assert fitting_ranks("DualPipeV", 5) == []


def test_the_names_are_all_that_torch_has_for_training() -> None:
    for schedule in SCHEDULES:
        assert get_schedule_class(schedule).__name__ == f"Schedule{schedule}"
