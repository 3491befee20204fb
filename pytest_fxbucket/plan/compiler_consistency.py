"""``[run] compiler`` beside keys that leave it nothing to compile. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan


def agree_on_compiler(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, where bitwise is off, or runs a step of several graphs."""
    inside = f'{where}: [run] compiler = "{plan.run.compiler}"'
    if plan.run.compiler == "none":
        return
    if not plan.checks.bitwise:
        raise PlanError(f"{inside} is what bitwise runs, and checks.bitwise is false; leave one of them out")
    if plan.pipeline is not None or plan.crosses_iterations:
        what = "[pipeline]" if plan.pipeline is not None else "next_iteration"
        raise PlanError(f"{inside} compiles a step of one graph, and {what} makes several of it; leave one of them out")
