"""The step that was captured last, handed on to the next row of a plan file's matrix that traces the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap, Passes
from pytest_fxbucket.plan.schema_checks import Checks, Eager, Run
from pytest_fxbucket.plan.schema_model import Pipeline

if TYPE_CHECKING:
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import StepGraph

_Traced = tuple[Plan, "Mesh", int]
S = TypeVar("S")


@dataclass(slots=True)
class LastStep:
    """Keeps one captured step: rows come one after another, and each graph may be large."""

    _of: _Traced | None = None
    _step: StepGraph | None = None
    _staged: tuple[StepGraph, Any] | None = None
    """The step that was cut into pipeline stages last, and its stages."""

    def get(self, plan: Plan, mesh: Mesh, rank: int, capture: Callable[[Plan], StepGraph]) -> StepGraph:
        """The step of ``plan`` as ``rank`` of ``mesh`` traces it: the last one, if that is the same, or what ``capture`` gives.

        ``capture`` is given :func:`as_traced` of the plan, so that no key that is not compared can change the step.

        The graph of a ``[graph]`` factory is asked for each time, since the factory may give another.
        """
        if plan.graph is not None:
            return capture(plan)
        of = as_traced(plan), mesh, rank
        if self._step is None or self._of != of:
            self._of = self._step = self._staged = None  # it may go before the next is made
            self._of, self._step = of, capture(of[0])
        return self._step

    def in_stages(self, plan: Plan, step: StepGraph, capture: Callable[[Plan], S]) -> S:
        """The stages of ``plan``, whose ``step`` :meth:`get` gave: the last ones, or what ``capture`` gives.

        They are the same for every schedule.
        """
        if self._staged is None or self._staged[0] is not step:
            self._staged = step, capture(as_traced(plan))
        staged: S = self._staged[1]
        return staged


def as_traced(plan: Plan) -> Plan:
    """``plan`` with defaults for all that its captured step does not depend on: plans that are equal then trace the same.

    The entries of ``[bucket]`` stay: they say where bytes are cast, what is gathered together and what stays gathered. A plan
    with optimizers keeps all of ``[bucket]`` and ``[overlap]``, on which it depends what is updated together.
    """
    bucket, overlap = plan.bucket, plan.overlap
    if not plan.optimizer:
        bucket, overlap = Bucket(plan=bucket.plan, by=bucket.by, unplanned=bucket.unplanned), Overlap()
    model = replace(plan.model, may_be_idle=()) if plan.model else None
    pipeline = replace(plan.pipeline, schedule=Pipeline().schedule) if plan.pipeline else None
    return replace(
        plan,
        matrix_id=None,
        model=model,
        pipeline=pipeline,
        bucket=bucket,
        overlap=overlap,
        passes=Passes(),
        transform=(),
        run=Run(seed=plan.run.seed),
        eager=Eager(),
        cluster=None,
        checks=Checks(),
    )
