"""Keys of ``[[transform]]`` that contradict each other or other tables."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.units import show


def agree_on_transforms(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _passes(plan, where)
    _next_iteration(plan, where)
    _merged_again(plan, where)


def _passes(plan: Plan, where: str) -> None:
    """The pass stands among transformations once, and says in tables of its own what it does."""
    passes = [number for number, one in enumerate(plan.transform, 1) if one.name == "bucket"]
    if len(passes) > 1:
        raise PlanError(f"{where}: [[transform]] {passes[0]} and {passes[1]} are both the pass, bucket; list it once")
    if passes and plan.transform[passes[0] - 1].args:
        raise PlanError(
            f"{where}: [[transform]] {passes[0]}: bucket takes no args; [bucket] and [overlap] say what the pass does"
        )


def _next_iteration(plan: Plan, where: str) -> None:
    """It gives three graphs: what needs one cannot follow."""
    moving = [number for number, one in enumerate(plan.transform, 1) if one.name == "next_iteration"]
    if not moving:
        return
    at = f"{where}: [[transform]] {moving[0]}"
    if len(moving) > 1:
        raise PlanError(f"{at} and {moving[1]} are both next_iteration; list all its entries in one")
    if moving[0] < len(plan.transform):
        after = plan.transform[moving[0]].name
        raise PlanError(f"{at}: next_iteration gives three graphs, and {after} stands behind it; list it last")
    if plan.checks.benchmark:
        raise PlanError(
            f"{at}: next_iteration gives three graphs, and [checks] benchmark times one; leave one of them out, by a matrix row"
        )
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
        if (again is True or again == "backward") and plan.parallel.reshard_after_forward is not False:
            raise PlanError(
                f"{where}: [[transform]] {number}: merge_duplicates with again = {show(again)} keeps what forward gathered "
                "until backward, where [parallel] reshard_after_forward = true gathers it again; use again = "
                '"microbatches", or set reshard_after_forward to false'
            )
