"""Keys of a plan file that contradict each other, or that would be read and ignored together. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.mesh_consistency import agree_on_mesh
from pytest_fxbucket.plan.pass_consistency import agree_on_pass
from pytest_fxbucket.plan.pipeline_consistency import agree_on_pipeline
from pytest_fxbucket.plan.run_consistency import agree_on_run
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.step_consistency import agree_on_step


def agree(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    if plan.model is None and plan.graph is None:
        raise PlanError(f"{where}: there is neither [model] nor [graph]; one of them says what is checked")
    if plan.model is not None and plan.graph is not None:
        raise PlanError(f"{where}: [model] and [graph] are both there; keep the one that is to be checked")
    agree_on_mesh(plan, where)
    agree_on_step(plan, where)
    agree_on_pipeline(plan, where)
    agree_on_run(plan, where)
    agree_on_pass(plan, where)
