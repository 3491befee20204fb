"""A first plan: its text, its pipeline stages, and whether it passes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.toml_text import to_toml
from pytest_fxbucket.user_code import user_code
from pytest_fxbucket.words import show

RANKS = 4
DP_SHARD, RUN_SHARD = 8, 2
"""Ranks of the job of a library's model, and those that really run of it."""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """``[model]`` of a first plan, and modules that it overrides; what is None was not found beside the factory."""

    factory: str
    args: Mapping[str, object]
    batch: str | None
    loss: str | None
    inputs: tuple[str | int, ...] = ()
    overridden: tuple[str, ...] = ()
    rounds_otherwise: tuple[str, ...] = ()
    """Reasons for which torch's own step rounds otherwise, as ``[eager]`` names them."""

    @property
    def placeholder(self) -> str:
        """What a batch function would be called."""
        return self.factory.partition(":")[0] + ":batch"


@dataclass(frozen=True, slots=True)
class StagesDraft:
    """``[pipeline]`` of a first plan: ``count`` stages, one on each rank of ``pp``."""

    count: int
    cuts: tuple[str, ...] = ()
    """Empty: to be proposed."""
    schedule: str = "1F1B"
    microbatches: int = 0
    """0: as many as there are stages."""


def plan_text(source: PlanSource, bucket: Draft, stages: StagesDraft | None = None) -> str:
    """The plan file."""
    return "\n".join(_lines(source, bucket, stages)) + "\n"


def _lines(source: PlanSource, bucket: Draft, stages: StagesDraft | None) -> Iterator[str]:
    yield "[model]"
    yield f"factory = {to_toml(source.factory)}"
    if source.args:
        yield f"args = {to_toml(source.args)}"
    if source.batch is None:
        yield "# To be written: callable(rank, step) -> (inputs, targets), or a dict with a key for each input."
        yield "# Each rank and step needs another batch; the plan cannot run before this names one."
    yield f"batch = {to_toml(source.batch or source.placeholder)}"
    if source.inputs:
        yield f"inputs = {to_toml(list(source.inputs))}  # the model gets this of a batch, the loss the rest"
    if source.loss is None:
        yield "# loss is left out: the loss in the model's output is used, or the output itself if it is a scalar."
    else:
        yield f"loss = {to_toml(source.loss)}"
    yield from override_lines(source.overridden)
    yield from parallel_lines(RANKS)
    if stages is not None:
        yield f"pp = {stages.count}  # times as many, for the stages of [pipeline]"
        yield from ("", "[pipeline]")
        yield f"cuts = {to_toml(list(stages.cuts))}" if stages.cuts else f"stages = {stages.count}"
        yield f"schedule = {to_toml(stages.schedule)}"
        yield from ("", "[step]", f"microbatches = {stages.microbatches or stages.count}")
    yield from ("", *bucket.lines({}))
    yield from eager_lines(source.rounds_otherwise)


def written_model_lines(module: str) -> Iterator[str]:
    """``[model]`` whose factory, batches and loss are all in ``module``, which init writes, too."""
    yield "[model]"
    yield from (f'{key} = "{module}:{name}"' for key, name in (("factory", "build"), ("batch", "batch"), ("loss", "loss")))


def override_lines(selectors: Sequence[str]) -> Iterator[str]:
    """``[override]`` of ``selectors``; nothing if there are none."""
    if selectors:
        yield from ("", "[override]  # cannot be traced, since it looks at values: called as it is when the step runs")
        yield f"module = {to_toml(list(selectors))}"


def said_of_overrides(selectors: Sequence[str]) -> Iterator[str]:
    """What the user is told of overrides."""
    if selectors:
        yield f"Not traced, since they look at values: {', '.join(selectors)}; [override] calls them as they are."


def eager_lines(reasons: Sequence[str]) -> Iterator[str]:
    """``[eager]`` with ``reasons``; nothing if there are none."""
    if reasons:
        yield from ("", "[eager]  # where torch's own step rounds otherwise by design, and goes the graph's way")
        yield f"rounds_otherwise = {to_toml(list(reasons))}"


def said_of_rounding(reasons: Sequence[str]) -> Iterator[str]:
    """What the user is told of reasons."""
    from pytest_fxbucket.eager.reasons import WORDS

    for reason in reasons:
        yield f"eager goes the graph's way in {reason}, as [eager] rounds_otherwise says: {WORDS[reason]}."


def parallel_lines(ranks: int) -> Iterator[str]:
    """``[parallel]`` with so many ranks."""
    yield from ("", "[parallel]", f"dp_shard = {ranks}  # ranks of the real job")


def stages_draft(source: PlanSource, bucket: Draft, out: Path, count: int, say: Callable[[str], None]) -> StagesDraft:
    """``count`` stages with the cuts that parameters propose; without a batch the plan leaves that to whoever reads it.

    Raises FxbucketError for a model that cannot be cut so, or not be traced.
    """
    if source.batch is None:
        return StagesDraft(count)
    from pytest_fxbucket.pipeline.of_plan import batch_rows, planned_stages

    with user_code([Path.cwd()]):
        (plan,) = parse_plans(plan_text(source, bucket), out.resolve())
        # Microbatches must cut the rows of every tensor of the batch evenly, and 1F1B needs as many of them as stages.
        rows = gcd(*batch_rows(plan))
        fitting = [number for number in range(count, rows + 1) if rows % number == 0]
        # GPipe has no least number of microbatches, so it may have one for each row.
        asked = StagesDraft(count, microbatches=fitting[0]) if fitting else StagesDraft(count, (), "GPipe", max(1, rows))
        (plan,) = parse_plans(plan_text(source, bucket, asked), out.resolve())
        return replace(asked, cuts=planned_stages(plan, say).cuts)


def said_of(draft: StagesDraft) -> Iterator[str]:
    """What the user is told of the stages."""
    if draft.cuts:
        yield f"It is cut into {draft.count} stages of about equally many parameters, behind {', '.join(draft.cuts)}."
        yield "What was tried is the step without [pipeline]; fxbucket stages says what crosses the cuts."
    else:
        yield f"It asks for {draft.count} stages, whose cuts are proposed when there is a batch."
    if draft.schedule != "1F1B":
        few = f"{draft.microbatches} microbatches are all that a batch can be cut into"
        yield f"Its schedule is {draft.schedule}, since {few}: {show('1F1B')} needs {draft.count}."


# Does a first plan pass? Its step is traced, the pass is run and looked at, as pytest would; ranks are threads, if any are.


_MOST_ON_RANKS = 2**26
"""Bytes of the parameters of the largest model that ranks step: each of them has it twice, with gradients."""
_INPUTS: Sequence[tuple[str | int, ...]] = ((0,), ("0.*",))
"""Values of ``[model] inputs`` to try if the model does not take the whole batch: its first item, or the items in that."""


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A first plan, and what is still wrong with it."""

    source: PlanSource
    problem: PlanProblem | None = None


def tried(
    source: PlanSource, bucket: Draft, out: Path, modules: Mapping[str, type], nbytes: int, say: Callable[[str], None]
) -> TriedPlan:
    """``source`` with what it needs to pass: ``inputs``, overrides of some of ``modules``, reasons to round otherwise.

    ``nbytes`` are those of the model's parameters. A large model is traced alone.
    """
    checks = ("audit", "collectives", *(("eager",) if nbytes <= _MOST_ON_RANKS else ()))

    def problem_of(now: PlanSource) -> PlanProblem | None:
        (plan,) = parse_plans(plan_text(now, bucket), out.resolve())
        return first_failure(plan, checks, say, Path.cwd())

    def changed(now: PlanSource, problem: PlanProblem) -> PlanSource | None:
        if selector := problem.to_override(modules, now.overridden):
            return replace(now, overridden=(*now.overridden, selector))
        if problem.by_design:
            return replace(now, rounds_otherwise=(*now.rounds_otherwise, *problem.by_design))
        return None

    first = TriedPlan(*changed_until_right(source, problem_of, changed))
    # With the overrides found so far. If that does not help either, the problem told is that of the whole batch.
    if first.problem:
        for inputs in _INPUTS:
            other = TriedPlan(*changed_until_right(replace(first.source, inputs=inputs), problem_of, changed))
            if not other.problem:
                return other
    return first


_MOST_CHANGES = 8
Tried = TypeVar("Tried")


def changed_until_right(
    now: Tried,
    problem_of: Callable[[Tried], PlanProblem | None],
    changed: Callable[[Tried, PlanProblem], Tried | None],
) -> tuple[Tried, PlanProblem | None]:
    """``now``, ``changed`` for one problem after the other until it has none, nothing helps, or that were enough changes.

    Gives the problem that is left of it, too.
    """
    problem, count = problem_of(now), 0
    while problem and count < _MOST_CHANGES and (other := changed(now, problem)) is not None:
        now, count = other, count + 1
        problem = problem_of(now)
    return now, problem


_MODULE = re.compile(r"tracing module (\S+) failed")  # as errors of a capture have it


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """Why a plan does not pass."""

    sentence: str
    module: str = ""
    """The module that cannot be traced, if it is one."""
    looks_at_values: bool = False
    where: str = ""
    """In which size or flavor of a model that has several."""
    by_design: tuple[str, ...] = ()
    """Words of ``[eager] rounds_otherwise`` that may be all that is wrong."""

    def of_size(self, where: str, folder: Path) -> PlanProblem:
        """The problem in one of several sizes, in words that do not name the temporary ``folder`` of the plan's module."""
        return replace(self, sentence=self.sentence.replace(f"{folder}{os.sep}", ""), where=where)

    def to_override(self, modules: Mapping[str, type], overridden: Collection[str]) -> str:
        """The selector that overrides the module that looks at values; empty if none does, or if it is in ``overridden``."""
        selector = selector_of(self.module, modules) if self.looks_at_values else ""
        return selector if selector not in overridden else ""


def first_failure(
    plan: Plan, checks: Sequence[str], say: Callable[[str], None], root: Path | None = None
) -> PlanProblem | None:
    """What is wrong with ``plan``, whose code is found from ``root`` on; None if it passes ``checks``."""
    from pytest_fxbucket.compat.tracing import untraceable
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.settings import RunSettings

    # Goldens and artifacts go to a temporary folder, so that to try a plan leaves nothing beside it.
    pools = Pools()
    with TemporaryDirectory() as folder:
        settings = RunSettings(root or plan.path.parent, Path(folder), Path(folder), backend="local")
        run = PlanRun(plan, settings, pools, say)
        try:
            for check in checks:
                verdict = run.check(check)
                if verdict.outcome == "failed":
                    said = "; ".join((verdict.summary, *verdict.lines[:3]))
                    return PlanProblem(f"{check}: {said}", by_design=verdict.by_design)
        except FxbucketError as error:
            found = _MODULE.search(str(error))
            looks = error.__cause__ is not None and bool(untraceable(error.__cause__))
            return PlanProblem(str(error), found[1] if found else "", looks)
        finally:
            pools.close()
    return None


def selector_of(module: str, modules: Mapping[str, type]) -> str:
    """A selector of ``module`` and of its counterparts in other layers; empty if ``modules`` does not have it."""
    # All numbers in the name become "*", or else a single one, if all modules that match are of one class.
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    for places in (numbers, *([place] for place in numbers)):
        star = ["*" if place in places else part for place, part in enumerate(parts)]
        alike = re.compile(r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in star))
        classes = [cls for fqn, cls in modules.items() if alike.fullmatch(fqn)]
        if len(classes) > 1 and set(classes) == {modules.get(module)}:
            return ".".join(star)
    return module if module in modules else ""
