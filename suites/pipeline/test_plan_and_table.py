"""A plan takes what torch's schedule has a table for, and nothing else."""

from __future__ import annotations

import pytest

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.schedules import table_of
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES, fits_ranks, microbatches_problem, rank_of_stage


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_that_a_plan_takes_are_those_that_have_a_table(schedule: str) -> None:
    for pp in (1, 2, 3):
        for stages in range(1, 7):
            for microbatches in (1, 2, 3, 4, 5, 7, 8):
                fits = fits_ranks(schedule, stages, pp) and not microbatches_problem(schedule, microbatches, stages, pp)
                if not fits:
                    with pytest.raises(StageError):
                        table_of(schedule, stages, pp, microbatches)
                    continue
                table = table_of(schedule, stages, pp, microbatches)
                assert [rank_of_stage(schedule, stages, pp, stage) for stage in range(stages)] == list(table.owners)
