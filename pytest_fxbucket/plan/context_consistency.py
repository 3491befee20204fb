"""Keys of a plan file that cannot stand beside ``cp``. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import not_built
from pytest_fxbucket.plan.schema import Plan


def agree_on_context(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for what cannot be beside parts of the sequence."""
    mesh, inside = plan.parallel, f"{where}: [parallel]"
    if mesh.cp == 1:
        if mesh.cp_form == "ring":
            raise PlanError(
                f'{inside} cp_form = "ring" leads round one rank with cp = 1; set cp to 2 or more, or leave cp_form out'
            )
        return
    if mesh.has_ring and plan.pipeline is not None:
        raise not_built(
            f"{inside} cp_form",
            mesh.cp_form,
            "its sends name the neighbours of each rank, and one graph of a stage serves all its ranks; "
            'use cp_form = "all_gather" beside [pipeline]',
        )
    if mesh.ep > 1:
        raise PlanError(f"{inside} cp = {mesh.cp} is not built yet beside ep = {mesh.ep}; leave one of them out")
    if plan.override:
        raise PlanError(
            f"{inside} cp = {mesh.cp} gathers what attention reads where a module is traced, and [[override]] leaves modules "
            "untraced; leave one of them out"
        )
