"""``[checks] benchmark`` as a table: how step time is measured and judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_fxbucket.plan.rules import part, passes, seconds


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The options of the check ``benchmark``."""

    threshold: float = field(default=0.03, metadata=part("a smaller loss of step time is no regression"))
    precision: float = field(
        default=0.01,
        metadata=part("how well bucketed/unbucketed is to be known; samples end when it is, 0: when the time is over"),
    )
    budget_s: float = field(default=20.0, metadata=seconds("seconds for warm-up and samples in all"))
    against: tuple[str, ...] = field(
        default=(), metadata=passes('passes that are timed beside the plan\'s: `"torch"` or `"module:callable"`')
    )
