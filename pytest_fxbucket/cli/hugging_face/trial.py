"""Does the plan pass? Both sizes are traced, and the pass is run and looked at, as pytest would; ranks are not started.

What a plan or the module can do about a model that does not pass is tried; what is left is said, with the way out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_fxbucket.cli.first_plan import selector_of
from pytest_fxbucket.cli.hugging_face.module_text import Written
from pytest_fxbucket.cli.hugging_face.plan_text import HfPlan, plan_text
from pytest_fxbucket.cli.hugging_face.rehearsal import laid_out
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.schema import Plan

_MOST_TRIES = 8
_MODULE = re.compile(r"tracing module (\S+) failed")
_TWO_DTYPES = "which torch refuses"


@dataclass(frozen=True)
class Problem:
    """Why a plan does not pass."""

    said: str
    size: str
    """small or real."""
    module: str = ""
    """That cannot be traced."""
    looks_at_values: bool = False


@dataclass(frozen=True)
class Trial:
    """Module and plan, and what is still wrong with them."""

    written: Written
    plan: HfPlan
    problem: Problem | None = None


def tried(written: Written, plan: HfPlan, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> Trial:
    """``written`` and ``plan`` with what they need to pass: overrides of some of ``modules``, other attention, other dtypes."""
    for _ in range(_MOST_TRIES):
        problem = _problem(written, plan, out, say)
        if problem is None:
            return Trial(written, plan)
        selector = selector_of(problem.module, modules) if problem.looks_at_values else ""
        if selector and selector not in plan.overridden and not _holds_an_entry(problem.module, plan):
            plan = replace(plan, overridden=(*plan.overridden, selector))
        elif _TWO_DTYPES in problem.said and plan.param_dtype:
            plan = replace(plan, param_dtype=None)
        elif problem.size == "real" and not written.eager_attention:
            written = replace(written, eager_attention=True)
        else:
            return Trial(written, plan, problem)
    return Trial(written, plan, problem)


def _holds_an_entry(module: str, plan: HfPlan) -> bool:
    """Whether blocks of the model are in ``module``: called as it is, it would leave nothing of them to bucket."""
    names = (name for entry in plan.bucket.entries for name in entry.split("+"))
    return any(name.startswith(f"{module}.") for name in names)


def _problem(written: Written, plan: HfPlan, out: Path, say: Callable[[str], None]) -> Problem | None:
    """What is wrong, of the small size first, which is soon told."""
    with laid_out(written) as folder:
        real, small = parse_plans(plan_text(plan), folder / out.name)
        for size, one, checks in (("small", small, ("audit",)), ("real", real, ("audit", "collectives"))):
            if problem := _first_failure(one, size, checks, say):
                return replace(problem, said=problem.said.replace(f"{folder}{os.sep}", ""))
    return None


def _first_failure(plan: Plan, size: str, checks: tuple[str, ...], say: Callable[[str], None]) -> Problem | None:
    from pytest_fxbucket.compat.tracing import untraceable
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings

    pools, folder = Pools(), plan.path.parent
    run = PlanRun(plan, RunSettings(folder, folder, folder / ".fxbucket", backend="local"), pools, say)
    try:
        for check in checks:
            verdict = run.check(check)
            if verdict.outcome == "failed":
                return Problem(f"{check}: {'; '.join((verdict.summary, *verdict.lines[:3]))}", size)
    except FxbucketError as error:
        found = _MODULE.search(str(error))
        looks = error.__cause__ is not None and bool(untraceable(error.__cause__))
        return Problem(str(error), size, found[1] if found else "", looks)
    finally:
        pools.close()
    return None
