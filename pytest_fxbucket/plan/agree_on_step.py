"""Keys of ``[step]`` and ``[optimizer]`` that contradict each other, or that would be read and ignored."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Parallel, Plan, Step


def agree_on_step(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    if plan.graph is not None:
        _of_a_graph(plan, where)
        return
    if not plan.optimizer:
        if plan.step.clip_norm:
            raise PlanError(f"{where}: [step] clip_norm clips what an optimizer sees, and there is no [optimizer]")
        if plan.overlap.updates != "last":
            raise PlanError(f"{where}: [overlap] updates is of the optimizer's, and there is no [optimizer]")
    if plan.bucket.by == "size" and any(one.groups == "entry" for one in plan.optimizer):
        raise PlanError(f'{where}: [optimizer] groups = "entry" needs entries, and by = "size" makes none')
    rest = [number for number, one in enumerate(plan.optimizer, 1) if not one.params]
    if len(rest) > 1:
        raise PlanError(
            f"{where}: [[optimizer]] {rest[0]} and {rest[1]} both leave params out, and only one can have all the rest"
        )


def _of_a_graph(plan: Plan, where: str) -> None:
    """What capture would do with a model it cannot do with a graph that is traced already."""
    mesh, plain = plan.parallel, Parallel()
    keys = ("tp_plan", "ep", "ep_plan", "reduce_order")
    if key := next((key for key in keys if getattr(mesh, key) != getattr(plain, key)), ""):
        raise PlanError(f"{where}: [parallel] {key} is for a [model] that is to be traced; leave it out beside [graph]")
    if plan.step != Step():
        raise PlanError(f"{where}: [step] is for a [model] that is to be traced; leave it out beside [graph]")
    if plan.optimizer:
        raise PlanError(f"{where}: [optimizer] is for a [model] that is to be traced; leave it out beside [graph]")
