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
    refuse_order(stages, place)
    foreign = (stage.name.partition(":")[0] for stage in stages if stage.name not in BUILT_IN)
    return Stages(tuple(stages[:place]), tuple(stages[place:]), tuple(dict.fromkeys(foreign)))


def _stage(plan: Plan, number: int) -> Stage | None:
    """The ``number``-th table, from 0; None for the pass."""
    one = plan.transform[number]
    if one.name == BUCKET:
        return None
    where = f"{plan.path}: [[transform]] {number + 1}"
    return Stage(one.name, f"{where}: {one.name}", import_callable(BUILT_IN.get(one.name, one.name), where), one.args)


def refuse_order(stages: Sequence[Stage], place: int | None = None) -> None:
    """Raise PlanError for an order that a transformation's traits do not allow.

    ``place``: how many of ``stages`` come before the pass; None where there is no plan, whose pass would be among them.
    """
    order = [(stage.name, stage.where, traits_of(stage.function)) for stage in stages]
    if place is not None:
        order.insert(place, (BUCKET, "", Traits()))
        _refuse_late_rounding(order)
    for number, (_, where, traits) in enumerate(order):
        later = [other for other, _, _ in order[number + 1 :]]
        if wrong := next((other for other in traits.after if other in later), None):
            raise PlanError(f"{where} must come after {wrong}; list it below that")
        if traits.crosses_iterations and later:
            raise PlanError(f"{where} gives three graphs, and {later[0]} stands behind it; list it last")
        earlier = [other for other, _, _ in order[:number]]
        if wrong := next((other for other in traits.before if other in earlier), None):
            raise PlanError(f"{where} must come before {wrong}; list it above that")


def _refuse_late_rounding(order: Sequence[tuple[str, str, Traits]]) -> None:
    """Bitwise compares with the step behind what rounds otherwise: all that does not round must come behind that."""
    names = [name for name, _, _ in order]
    for number, (name, where, traits) in enumerate(order):
        if traits.rounds and BUCKET in names[:number]:
            raise PlanError(
                f"{where} rounds otherwise than the step before it, so it must come before {BUCKET}: what comes after is "
                "compared bit for bit; list it above that"
            )
        late = next((other for other, _, its in order[number:] if its.rounds), "")
        if late and not traits.rounds and name != BUCKET:
            raise PlanError(
                f"{where} must come after {late}, which rounds otherwise: what comes before that is compared with nothing; "
                "list it below that"
            )
