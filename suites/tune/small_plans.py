"""Plans of a small Llama that searches begin with, and scorers that simulate nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.tune.moves import PlanMove
from pytest_fxbucket.tune.search import SimulatedScore
from suites.plans.llama import BUCKETS, MIXED, head

ROOT = Path(__file__).parents[2]
HEAD = (
    head("layers = 4, dim = 64", 4, **MIXED)
    + """
[cluster]
preset = "h100-sxm"
within = { bandwidth = 2 }
memory_bandwidth = 20
tflops = { float32 = 0.05, bfloat16 = 0.05 }
launch_us = 0
"""
)
"""Compute takes about as long as communication."""
SMALL = ("layers = 4, dim = 64", "layers = 2, dim = 32")
"""What to replace, and with what, where the model is really traced."""
STARS = HEAD + BUCKETS
NAMES = ("tok_embeddings", *(f"layers.{number}" for number in range(4)), "norm+output")


def plan_of(text: str) -> Plan:
    """The plan above the rows."""
    return parse_plans(text, ROOT / "tuned.toml")[0]


@dataclass
class Told:
    """A scorer that is told what each plan takes, and offers the same moves from each."""

    seconds: Callable[[Plan], float]
    offered: Callable[[Plan], Sequence[PlanMove]]
    peak: Callable[[Plan], int] = lambda plan: 0
    reasons: dict[str, float] = field(default_factory=dict)
    efforts: Callable[[Plan], float] = lambda plan: 1.0
    costs: Callable[[Plan], float] = lambda plan: 0.0
    scored: list[Plan] = field(default_factory=list)

    def score(self, plan: Plan) -> SimulatedScore:
        self.scored.append(plan)
        return SimulatedScore(self.seconds(plan), 0.0, self.peak(plan), self.reasons)

    def effort(self, plan: Plan) -> float:
        return self.efforts(plan)

    def takes(self, plan: Plan) -> float:
        return self.costs(plan)

    def moves(self, plan: Plan) -> Sequence[PlanMove]:
        return self.offered(plan)
