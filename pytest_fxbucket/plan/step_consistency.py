"""Keys that say what is traced and transformed, and that contradict each other or would be ignored. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Parallel, Step
from pytest_fxbucket.words import show


def agree_on_step(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _of_overrides(plan, where)
    if plan.graph is not None:
        _of_a_graph(plan, where)
    elif not plan.optimizer:
        _without_optimizer(plan, where)
    else:
        _of_optimizers(plan, where)
    _passes(plan, where)
    _next_iteration(plan, where)
    _merged_again(plan, where)


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
        if one.groups == "entry" and not plan.bucket.has_entries:
            inside = f"[[optimizer]] {number}:" if several else "[optimizer]"
            none = f"by = {show(plan.bucket.by)} makes none"
            raise PlanError(f'{where}: {inside} groups = "entry" needs entries, and {none}; use groups = "one"')
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
    """Refuse keys for what capture does with a model: a ``[graph]`` is traced already."""
    mesh, plain = plan.parallel, Parallel()
    keys = ("pp", "cp", "cp_form", "tp_plan", "ep", "ep_plan", "reduce_order")
    key = next((key for key in keys if getattr(mesh, key) != getattr(plain, key)), "")
    tables = (
        f"[parallel] {key}" if key else "",
        "[pipeline]" if plan.pipeline is not None else "",
        "[step]" if plan.step != Step() else "",
        "[override]" if plan.override else "",
        "[optimizer]" if plan.optimizer else "",
    )
    if found := next(filter(None, tables), ""):
        raise PlanError(f"{where}: {found} is for a [model] that is to be traced; leave it out beside [graph]")


def _passes(plan: Plan, where: str) -> None:
    """Refuse the pass twice among transformations, or with arguments: its own tables say what it does."""
    passes = [number for number, one in enumerate(plan.transform, 1) if one.name == "bucket"]
    if len(passes) > 1:
        raise PlanError(f"{where}: [[transform]] {passes[0]} and {passes[1]} are both the pass, bucket; list it once")
    if passes and plan.transform[passes[0] - 1].args:
        raise PlanError(
            f"{where}: [[transform]] {passes[0]}: bucket takes no args; [bucket] and [overlap] say what the pass does"
        )


def _next_iteration(plan: Plan, where: str) -> None:
    """Refuse what cannot be beside ``next_iteration``: it makes three graphs of the step, and moves updates between them."""
    moving = [number for number, one in enumerate(plan.transform, 1) if one.name == "next_iteration"]
    if not moving:
        return
    at = f"{where}: [[transform]] {moving[0]}"
    if len(moving) > 1:
        raise PlanError(f"{at} and {moving[1]} are both next_iteration; list all its entries in one")
    if moving[0] < len(plan.transform):
        # Numbers begin at 1, so this is the one behind it.
        after = plan.transform[moving[0]].name
        raise PlanError(f"{at}: next_iteration gives three graphs, and {after} stands behind it; list it last")
    if plan.step.clip_norm:
        raise PlanError(
            f"{at}: next_iteration moves updates, and [step] clip_norm makes each of them need the reductions of all; leave "
            "one of them out"
        )
    if plan.overlap.insert_overlap_deps:
        raise PlanError(
            f"{at}: next_iteration moves what [overlap] insert_overlap_deps = true would hold in its place; leave that out"
        )


def _merged_again(plan: Plan, where: str) -> None:
    for number, one in enumerate(plan.transform, 1):
        again = one.args.get("again", False) if one.name == "merge_duplicates" else False
        # Left out, it gathers most parameters again, and a table may.
        gathers_again = plan.parallel.mode != "replicate" and plan.parallel.reshard_after_forward is not False
        if (again is True or again == "backward") and gathers_again:
            raise PlanError(
                f"{where}: [[transform]] {number}: merge_duplicates with again = {show(again)} keeps what forward gathered "
                "until backward, where [parallel] reshard_after_forward = true gathers it again; use again = "
                '"microbatches", or set reshard_after_forward to false'
            )
