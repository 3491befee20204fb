"""Plans of models with overridden modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan.schema_model import Model, Override, Parallel, Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.roles import StepGraph

MODELS, CALLABLES = "suites.capture.override_models", "suites.capture.override_subgraphs"


def override(by: str = "call", *, module: str = "", type: str = "", output: str = "", **args: Any) -> Override:
    named = parse_entries([module], "test") if module else ()
    of = f"{MODELS}:{type}" if type else None
    return Override(named, of, by if by == "call" else f"{CALLABLES}:{by}", args, f"{CALLABLES}:{output}" if output else None)


def plan_of(factory: str, *overrides: Override, checkpoint: str = "", microbatches: int = 1, **parallel: Any) -> Plan:
    kind, _, args = factory.partition(" ")
    model = Model(f"{MODELS}:{kind}", f"{MODELS}:batch", {"kind": args} if args else {}, f"{MODELS}:loss")
    step = Step(microbatches=microbatches, checkpoint=parse_entries([checkpoint] if checkpoint else [], "test"))
    return Plan(
        Path("plan.toml"),
        model=model,
        parallel=Parallel(**{"dp_shard": 2, "reshard_after_forward": True, **parallel}),
        step=step,
        override=overrides,
        bucket=Bucket(unplanned="root"),
        run=Run(seed=3),
    )


def captured(plan: Plan, **changes: Any) -> StepGraph:
    plan = replace(plan, **changes)
    return capture_plan(plan, mesh_of(plan), 0)
