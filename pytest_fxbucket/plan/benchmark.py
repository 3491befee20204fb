"""``[checks] benchmark`` as a table: how step time is measured and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import Rule, part, passes, seconds
from pytest_fxbucket.units import nearest


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The options of the check ``benchmark``."""

    threshold: float = field(default=0.03, metadata=part("a smaller loss of step time is no regression"))
    precision: float = field(
        default=0.01,
        metadata=part("how well bucketed/unbucketed is to be known; samples end when it is, 0: when the time is over"),
    )
    budget_s: float = field(
        default=20.0,
        metadata=seconds("seconds of warm-up and samples; at least 8 rounds of each are run in each of 4 sets of processes"),
    )
    against: tuple[str, ...] = field(
        default=(), metadata=passes('passes that are timed beside the plan\'s: `"torch"` or `"module:callable"`')
    )


def benchmark_of(planned: Benchmark | Literal[False], changes: Mapping[str, object]) -> Benchmark:
    """The plan's options, or the defaults, with ``changes``. Raises PlanError for what no plan may hold."""
    known = {spec.name: cast(Rule, spec.metadata["rule"]) for spec in fields(Benchmark)}
    for key in changes:
        if key not in known:
            raise PlanError(f'fxbucket_benchmark has no argument "{key}"{nearest(key, list(known))}')
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    read = {key: known[key].read(value, f"fxbucket_benchmark: {key}") for key, value in given.items()}
    return replace(planned or Benchmark(), **cast("dict[str, Any]", read))
