"""Keys of ``[step]`` and ``[optimizer]`` that contradict each other, or that would be read and ignored."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import show
from pytest_fxbucket.plan.schema import Parallel, Plan, Step


def agree_on_step(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    if plan.graph is not None:
        _of_a_graph(plan, where)
    elif not plan.optimizer:
        _without_optimizer(plan, where)
    else:
        _of_optimizers(plan, where)


def _without_optimizer(plan: Plan, where: str) -> None:
    clip, updates = plan.step.clip_norm, plan.overlap.updates
    none = "there is no [optimizer]; add one, or leave"
    if clip:
        raise PlanError(f"{where}: [step] clip_norm = {clip:g} clips what an optimizer sees, and {none} clip_norm out")
    if updates != "last":
        raise PlanError(f"{where}: [overlap] updates = {show(updates)} places an optimizer's updates, and {none} updates out")


def _of_optimizers(plan: Plan, where: str) -> None:
    several = len(plan.optimizer) > 1
    for number, one in enumerate(plan.optimizer, 1):
        if one.groups == "entry" and plan.bucket.by == "size":
            inside = f"[[optimizer]] {number}:" if several else "[optimizer]"
            raise PlanError(f'{where}: {inside} groups = "entry" needs entries, and by = "size" makes none; use groups = "one"')
    rest = [number for number, one in enumerate(plan.optimizer, 1) if not one.params]
    if len(rest) > 1:
        raise PlanError(
            f"{where}: [[optimizer]] {rest[0]} and {rest[1]} both leave params out, and only one can have all the rest; "
            "name those of the other"
        )


def _of_a_graph(plan: Plan, where: str) -> None:
    """What capture would do with a model it cannot do with a graph that is traced already."""
    mesh, plain = plan.parallel, Parallel()
    keys = ("tp_plan", "ep", "ep_plan", "reduce_order")
    key = next((key for key in keys if getattr(mesh, key) != getattr(plain, key)), "")
    tables = (
        f"[parallel] {key}" if key else "",
        "[step]" if plan.step != Step() else "",
        "[optimizer]" if plan.optimizer else "",
    )
    if found := next(filter(None, tables), ""):
        raise PlanError(f"{where}: {found} is for a [model] that is to be traced; leave it out beside [graph]")
