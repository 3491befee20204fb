"""Plans through our pass, captured once, whose graphs are broken and held against one check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pytest_fxbucket.checks.registry import check_of
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.mutate.mutant import Mutant, Spoiling, mutants_of
from pytest_fxbucket.mutate.registry import operators_of
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.user_code import user_code

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class BrokenPlan:
    """One plan, at the size that ranks run."""

    plan: str
    """Its file, with a row ``buckets.toml::deps``."""
    pools: Pools
    artifacts: Path

    @cached_property
    def run(self) -> PlanRun:
        plan, _ = find_plan(self.plan)
        return PlanRun(plan, RunSettings(ROOT, ROOT / "golden", self.artifacts), self.pools)

    @property
    def world(self) -> PlanOnMesh:
        """With the graphs as they are."""
        return self.run._run_world

    def mutants(self, operator: str) -> list[Mutant]:
        """Of one operator, in an order that is the same each time."""
        with user_code([ROOT]):
            return mutants_of(self.world, operators_of([operator]), 0)

    def broken(self, mutant: Mutant) -> PlanOnMesh:
        """With the graphs that ``mutant`` makes of them, made anew each time."""
        return Spoiling(self.world, mutant).world(self.world)

    def said(self, check: str, mutant: Mutant | None = None) -> Verdict:
        """What ``check`` says of ``mutant``, or of the graphs as they are. Raises FxbucketError as the check does."""
        return self.said_of(check, self.world if mutant is None else self.broken(mutant))

    def said_of(self, check: str, world: PlanOnMesh) -> Verdict:
        """What ``check`` says of the plan with the graphs of ``world``."""
        context = replace(self.run._context(check), world=world, on_ranks=lambda: world)
        with user_code([ROOT]):
            return check_of(check).run(context)


def digests(world: PlanOnMesh, rank: int) -> Mapping[str, str]:
    """Of the graphs of ``rank`` behind the pass and all transformations."""
    return {phase: one.digest for phase, one in world.final(rank).items()}


def targets(world: PlanOnMesh, rank: int) -> dict[str, str]:
    """What each node of the graphs of ``rank`` calls, by graph and name."""
    return {
        f"{phase} {node.name}": f"{node.op} {node.target}"
        for phase, one in world.final(rank).items()
        for node in one.bucketed.graph.nodes
    }
