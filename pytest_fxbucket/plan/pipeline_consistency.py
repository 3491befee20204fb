"""Keys of ``[pipeline]`` that contradict each other, the mesh or ``[step]``. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES, fits_ranks, fitting_ranks, microbatches_problem
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Pipeline
from pytest_fxbucket.words import show

_HOLDS = {"one": "one on each rank", "several": "as many on each rank", "two": "two on each rank"}


def agree_on_pipeline(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for stages that cannot be made or that do not fit the ranks."""
    pipeline, pp = plan.pipeline, plan.parallel.pp
    if pipeline is None:
        if pp > 1:
            raise PlanError(
                f"{where}: [parallel] pp = {pp} has no stages to spread; add [pipeline], as in stages = {pp}, or leave pp out"
            )
        return
    _one_way_to_cut(pipeline, max(2, pp), f"{where}: [pipeline]")
    _fits(plan, pipeline, "[parallel] pp", pp, where)
    if (small := plan.run_degrees["pp"]) != pp:
        _fits(plan, pipeline, "[run] world.pp", small, where)


def _one_way_to_cut(pipeline: Pipeline, count: int, inside: str) -> None:
    if pipeline.cuts and pipeline.stages is not None:
        raise PlanError(
            f"{inside} has both cuts and stages = {pipeline.stages}; keep cuts, or stages, of which the cuts are proposed"
        )
    if not pipeline.cuts and pipeline.stages is None:
        raise PlanError(
            f'{inside} says nowhere where a stage ends; write cuts, as in cuts = ["layers.3"], or stages = {count}, of which '
            "the cuts are proposed"
        )
    if pipeline.cuts and pipeline.balance != Pipeline().balance:
        raise PlanError(
            f"{inside} balance = {show(pipeline.balance)} is of cuts that are proposed, and here they are written; leave it "
            "out, or write stages instead of cuts"
        )


def _fits(plan: Plan, pipeline: Pipeline, key: str, pp: int, where: str) -> None:
    """Raise PlanError for stages that do not fit ``pp`` ranks, and for microbatches that do not fit the schedule."""
    schedule, stages, microbatches = pipeline.schedule, plan.stages, plan.step.microbatches
    if not fits_ranks(schedule, stages, pp):
        raise PlanError(
            f"{where}: {key} = {pp} does not fit the {stages} stages of [pipeline], of which schedule = {show(schedule)} has "
            f"{_HOLDS[SCHEDULES[schedule]]}; {_that_fits(plan, schedule, key, pp)}"
        )
    if problem := microbatches_problem(schedule, microbatches, stages, pp):
        on = "" if pp == plan.parallel.pp else f" on {key} = {pp}"
        raise PlanError(
            f"{where}: [step] microbatches = {microbatches} is not for [pipeline] schedule = {show(schedule)}{on}, which "
            f"{problem}"
        )


def _that_fits(plan: Plan, schedule: str, key: str, pp: int) -> str:
    """What to do instead, as a clause: the nearest number of ranks for the stages, or if none fits, a number of stages."""
    is_small = pp != plan.parallel.pp
    # In [run] world a degree is 2 or more, and one that is as large as the real one can be left out.
    fitting = [one for one in fitting_ranks(schedule, plan.stages) if not is_small or 2 <= one < plan.parallel.pp]
    if fitting:
        # The nearest, and of two as near the larger one.
        return f"use {key.rpartition(' ')[2]} = {min(fitting, key=lambda one: (abs(one - pp), -one))}"
    return "leave it out" if is_small else f"cut the model into {2 * pp}"
