"""Keys of ``[step]`` and ``[optimizer]`` that contradict each other, or that would be read and ignored."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Parallel, Plan, Step
from pytest_fxbucket.units import show


def agree_on_step(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _of_overrides(plan, where)
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


def _of_overrides(plan: Plan, where: str) -> None:
    for number, one in enumerate(plan.override, 1):
        inside = f"{where}: [[override]] {number}:" if len(plan.override) > 1 else f"{where}: [override]"
        if not one.module and one.type is None:
            raise PlanError(f"{inside} names no module; give it module, a list of names, or type, a class")
        if one.module and one.type is not None:
            raise PlanError(f"{inside} has both module and type; keep one, and make another [[override]] of the other")
        if one.by == "call" and one.args:
            raise PlanError(f'{inside} has args, which by = "call" does not take; leave them out, or give by a callable')
        if one.by != "call" and one.output is not None:
            raise PlanError(f'{inside} output is for by = "call": a sub-graph says itself what it gives; leave output out')


def _of_a_graph(plan: Plan, where: str) -> None:
    """What capture would do with a model it cannot do with a graph that is traced already."""
    mesh, plain = plan.parallel, Parallel()
    keys = ("tp_plan", "ep", "ep_plan", "reduce_order")
    key = next((key for key in keys if getattr(mesh, key) != getattr(plain, key)), "")
    tables = (
        f"[parallel] {key}" if key else "",
        "[step]" if plan.step != Step() else "",
        "[override]" if plan.override else "",
        "[optimizer]" if plan.optimizer else "",
    )
    if found := next(filter(None, tables), ""):
        raise PlanError(f"{where}: {found} is for a [model] that is to be traced; leave it out beside [graph]")
