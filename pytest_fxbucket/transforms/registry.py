"""What a plan may do to a step, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.transforms.running import Stage
from pytest_fxbucket.transforms.traits import BUCKET, Traits, traits_of

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Plan

BUILT_IN = {
    name: f"pytest_fxbucket.transforms.{name}:{name}" for name in ("merge_duplicates", "add_before_reducing", "next_iteration")
}
"""Where the transformations of our own are, by their names in a plan."""


@dataclass(frozen=True)
class Stages:
    """A plan's transformations before and after the pass, in order."""

    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()
    modules: tuple[str, ...] = ()
    """Python modules of transformations that are not ours, which may register operators of the graph."""


def stages_of(plan: Plan) -> Stages:
    """The transformations that ``plan`` lists, the pass in its place.

    Raises PlanError, one sentence that names the table, for what cannot be imported and for an order that a transformation's
    traits do not allow. The plan's folders must be on ``sys.path``.
    """
    if not plan.transform:
        return Stages()
    listed = [_stage(plan, number) for number in range(len(plan.transform))]
    place = next((number for number, stage in enumerate(listed) if stage is None), None)
    stages = [stage for stage in listed if stage is not None]
    if place is None:
        place = next((n for n, stage in enumerate(stages) if BUCKET in traits_of(stage.function).after), len(stages))
    _refuse_order(stages, place)
    foreign = (stage.name.partition(":")[0] for stage in stages if stage.name not in BUILT_IN)
    return Stages(tuple(stages[:place]), tuple(stages[place:]), tuple(dict.fromkeys(foreign)))


def _stage(plan: Plan, number: int) -> Stage | None:
    """The ``number``-th table, from 0; None for the pass."""
    one = plan.transform[number]
    if one.name == BUCKET:
        return None
    where = f"{plan.path}: [[transform]] {number + 1}"
    return Stage(one.name, f"{where}: {one.name}", import_callable(BUILT_IN.get(one.name, one.name), where), one.args)


def _refuse_order(stages: Sequence[Stage], place: int) -> None:
    """``place``: how many of ``stages`` come before the pass."""
    order = [(stage.name, stage.where, traits_of(stage.function)) for stage in stages]
    order.insert(place, (BUCKET, "", Traits()))
    for number, (_, where, traits) in enumerate(order):
        later = [other for other, _, _ in order[number + 1 :]]
        if wrong := next((other for other in traits.after if other in later), None):
            raise PlanError(f"{where} must come after {wrong}; list it below that")
        earlier = [other for other, _, _ in order[:number]]
        if wrong := next((other for other in traits.before if other in earlier), None):
            raise PlanError(f"{where} must come before {wrong}; list it above that")
        if traits.rounds and BUCKET in earlier:
            raise PlanError(
                f"{where} rounds otherwise than the step before it, so it must come before {BUCKET}: what comes after is "
                "compared bit for bit; list it above that"
            )
