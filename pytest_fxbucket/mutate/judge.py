"""What a plan's checks say of its mutants, one after the other, and whether a mutant that they miss is harmless."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.bitwise.job import FEWEST_STEPS
from pytest_fxbucket.checks.on_ranks import added_state
from pytest_fxbucket.checks.registry import CHECKS, check_of
from pytest_fxbucket.cost.cluster import cluster_named, cluster_of
from pytest_fxbucket.errors import FxbucketError, RankError, named, text_of
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.store import GoldenStore
from pytest_fxbucket.mutate.mutant import CannotMakeError, Spoiling, diff_of, mutants_of
from pytest_fxbucket.mutate.registry import operators_of
from pytest_fxbucket.mutate.score import OTHER_ORDER, SAME_STEP, Harmless, Judged, MutationScore
from pytest_fxbucket.plan_on_mesh import text_of as golden_text_of
from pytest_fxbucket.simulate.of_plan import bucketed

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.mutate.mutant import Mutant
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh

NOT_ASKED = ("benchmark", "mutation")
"""Checks that are not run on mutants: ``benchmark`` finds no faults, ``mutation`` is this check."""
_DEFAULT = "h100-sxm"
"""Cluster for plans without one of their own. A simulation on it says whether a mutant is slower."""
_LONGEST_S = 30.0
"""Most that ranks may take, if the plan does not say less: a mutant that checks without ranks do not find may hang."""
_SAME = 1e-6
"""Relative difference between two simulated times that may come from summing in another order."""


@dataclass(frozen=True)
class Judge:
    """Holds mutants of one plan against its checks."""

    context: Context

    @cached_property
    def checks(self) -> list[str]:
        """Checks that the plan has on, in order, those on ranks last."""
        on = [name for name in CHECKS if getattr(self.context.plan.checks, name) and name not in NOT_ASKED]
        if not self._has_golden():
            on = [name for name in on if name != "golden"]
        return sorted(on, key=lambda name: CHECKS[name].on_ranks)

    def _has_golden(self) -> bool:
        """Whether there is a golden that stays as it is: one that this run writes finds nothing."""
        settings, plan = self.context.settings, self.context.plan
        path = GoldenStore(settings.golden_dir, settings.rootdir).path_for(plan.path, plan.matrix_id)
        return path.exists() and (self.context.accept_golden is None or not accepts(settings.accept, path))

    def refuse_red(self) -> None:
        """Raise FxbucketError if the plan as it is does not pass one of its checks."""
        for name in self.checks:
            verdict = check_of(name).run(self.context)
            if verdict.outcome == "failed":
                what = f"{name} fails on the graph as it is: {verdict.summary}"
                raise FxbucketError(f"{self.context.name}: {what}; a plan's score says something where its checks pass")

    def judged(self, mutant: Mutant) -> Judged:
        """What the checks say of ``mutant``: all without ranks, bitwise where audit and collectives are green, then eager."""
        spoiling = Spoiling(self.context.run_world, mutant)
        context = self._with(spoiling, mutant)
        # Graphs are broken when they are first asked for: asked for here, a place that cannot be broken is no check's find.
        try:
            for world in (context.world, context.run_world):
                for rank in world.ranks():
                    world.versions(rank)
        except CannotMakeError as error:
            return Judged(mutant, unmade=str(error))
        except Exception:
            pass  # a graph that cannot be read; each check says so
        found: dict[str, str] = {}
        undecided: dict[str, str] = {}

        def said_by(name: str) -> str:
            return self._outcome_of(name, context, found, undecided)

        said = {name: said_by(name) for name in self.checks if not CHECKS[name].on_ranks}
        equal = None
        # Bitwise runs even if the plan has it off, to learn whether values are equal; then it does not count as the finder.
        # State that transformations added is compared with nothing, so with it "passed" does not tell.
        if not {"audit", "collectives"} & found.keys():
            said["bitwise"] = said_by("bitwise")
            equal = {"passed": None if added_state(context.run_world) else True, "failed": False}.get(said["bitwise"])
            if "bitwise" not in self.checks:
                found.pop("bitwise", None)
        # Eager runs ranks, too, so it is asked only of what nothing but golden has found.
        if not found.keys() - {"golden"} and "eager" in self.checks:
            said_by("eager")
        judged = Judged(mutant, found, undecided, equal, diff=tuple(diff_of(*spoiling.changed)) if spoiling.changed else ())
        if judged.without_golden or not equal:
            return judged
        return replace(judged, harmless=self._why_harmless(context))

    def _with(self, spoiling: Spoiling, mutant: Mutant) -> Context:
        own = self.context
        # With fewer steps bitwise tries no edge values, and a mutant that only these show would survive.
        run = replace(
            own.plan.run, timeout_s=min(own.plan.run.timeout_s, _LONGEST_S), steps=max(own.plan.run.steps, FEWEST_STEPS)
        )
        # A plan has two sizes, the real mesh and the one that ranks run; where they differ, each has a broken copy of its own.
        on_ranks = spoiling.world(own.run_world, replace(own.plan, run=run))
        world = on_ranks if own.world is own.run_world else Spoiling(own.world, mutant).world(own.world)
        return replace(
            own,
            plan=on_ranks.plan,
            world=world,
            on_ranks=lambda: on_ranks,
            accept_golden=None,
            on_compare=lambda _: None,
            briefly=True,
        )

    def _outcome_of(self, name: str, context: Context, found: dict[str, str], undecided: dict[str, str]) -> str:
        """The outcome of a check; what it finds goes into ``found``.

        A check also fails if ranks took too long or cannot be had, or by a fault of its own. None of these is a verdict on the
        mutant, so they go into ``undecided``.
        """
        try:
            verdict = check_of(name).run(context)
        except RankError as error:
            undecided[name] = text_of(error)
            return "undecided"
        except FxbucketError as error:
            found[name] = text_of(error)
            return "failed"
        except Exception as error:  # ours, and to be mended
            undecided[name] = f"raised {named(error)}"
            return "undecided"
        if verdict.is_only_late:
            undecided[name] = verdict.summary
            return "undecided"
        if verdict.outcome == "failed":
            found[name] = next(iter(verdict.lines), verdict.summary)
        return verdict.outcome

    def _why_harmless(self, context: Context) -> Harmless:
        """Why a mutant with the same values may pass; empty if it is slower or needs more memory than the graph before."""
        if self._schedule(context.run_world) == self._first[0]:
            return SAME_STEP
        now, was = self._simulated(context.run_world), self._first[1]
        if all(
            seconds <= before[0] * (1 + _SAME) and peak <= before[1] for (seconds, peak), before in zip(now, was, strict=True)
        ):
            return OTHER_ORDER
        return ""

    @cached_property
    def _first(self) -> tuple[str, list[tuple[float, int]]]:
        world = self.context.run_world
        return self._schedule(world), self._simulated(world)

    def _schedule(self, world: PlanOnMesh) -> str:
        return "\n".join(golden_text_of(world, ranks[0], self.context.name) for ranks, _ in world.distinct())

    def _simulated(self, world: PlanOnMesh) -> list[tuple[float, int]]:
        found: dict[int, tuple[float, int]] = {}
        for ranks, _ in world.distinct():
            line = bucketed(world, ranks[0], self._cluster)
            found |= dict.fromkeys(ranks, (line.seconds, line.peak_bytes))
        return [found[rank] for rank in sorted(found)]

    @cached_property
    def _cluster(self) -> Cluster:
        return cluster_of(self.context.plan) or cluster_named(_DEFAULT, self.context.plan.path.parent)


@dataclass(frozen=True, slots=True)
class MutantSelection:
    """Which mutants are to be judged; plain data."""

    operators: tuple[str, ...] = ()
    """Their names; all of ours if there are none."""
    seed: int = 0
    at_most: int = 100
    seconds: float = inf
    """After so many seconds no further mutant is begun."""
    worker: int = 0
    workers: int = 1
    """Number of workers; worker k takes every mutant whose number is k modulo that."""


def scored(context: Context, asked: MutantSelection) -> Iterator[MutationScore]:
    """The score so far, after each mutant of the plan that ``context`` is of.

    Raises FxbucketError for a plan that does not pass its own checks, UsageError for an operator that there is not.
    """
    end = time.monotonic() + asked.seconds
    operators = operators_of(asked.operators)
    judge = Judge(context)
    context.say("running the checks on the graph as it is")
    judge.refuse_red()
    mutants = mutants_of(context.run_world, operators, asked.seed)
    # Cut first and dealt then, so that all workers together judge ``at_most`` of them.
    own = mutants[: asked.at_most][asked.worker :: asked.workers]
    judged: list[Judged] = []
    for number, mutant in enumerate(own, 1):
        if judged and time.monotonic() > end:  # however short the time, one mutant is judged
            break
        score = MutationScore(judged, len(mutants))
        context.say(f"mutant {number} of {len(own)}, {mutant.name}; found {score.found_count} of {len(score.counted_mutants)}")
        judged.append(judge.judged(mutant))
        yield MutationScore(tuple(judged), len(mutants))
