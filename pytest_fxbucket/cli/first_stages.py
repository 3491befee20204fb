"""``[pipeline]`` of a first plan: as many stages as are asked for, on as many ranks, of about equally many parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.cli.first_plan import PlanSource, StagesDraft, plan_text
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.user_code import user_code
from pytest_fxbucket.words import show


def stages_draft(source: PlanSource, bucket: Draft, out: Path, count: int, say: Callable[[str], None]) -> StagesDraft:
    """``count`` stages with the cuts that parameters propose; without a batch the plan leaves that to whoever reads it.

    Raises FxbucketError for a model that cannot be cut so, or not be traced.
    """
    if source.batch is None:
        return StagesDraft(count)
    from pytest_fxbucket.pipeline.of_plan import batch_rows, planned_stages

    with user_code([Path.cwd()]):
        (plan,) = parse_plans(plan_text(source, bucket), out.resolve())
        rows = gcd(*batch_rows(plan))
        fitting = [number for number in range(count, rows + 1) if rows % number == 0]
        asked = StagesDraft(count, microbatches=fitting[0]) if fitting else StagesDraft(count, (), "GPipe", max(1, rows))
        (plan,) = parse_plans(plan_text(source, bucket, asked), out.resolve())
        return replace(asked, cuts=planned_stages(plan, say).cuts)


def said_of(draft: StagesDraft) -> Iterator[str]:
    """What a person is told of it."""
    if draft.cuts:
        yield f"It is cut into {draft.count} stages of about equally many parameters, behind {', '.join(draft.cuts)}."
        yield "What was tried is the step without [pipeline]; fxbucket stages says what crosses the cuts."
    else:
        yield f"It asks for {draft.count} stages, whose cuts are proposed when there is a batch."
    if draft.schedule != "1F1B":
        few = f"{draft.microbatches} microbatches are all that a batch can be cut into"
        yield f"Its schedule is {draft.schedule}, since {few}: {show('1F1B')} needs {draft.count}."
