"""A first plan: its text, and whether it passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_fxbucket.cli.first_entries import Draft
from pytest_fxbucket.cli.first_failure import MOST_OVERRIDES, first_failure
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.toml_text import to_toml

RANKS = 4


@dataclass(frozen=True, slots=True)
class PlanSource:
    """``[model]`` of a first plan, and modules that it overrides; what is None was not found beside the factory."""

    factory: str
    args: Mapping[str, object]
    batch: str | None
    loss: str | None
    inputs: tuple[str | int, ...] = ()
    overridden: tuple[str, ...] = ()

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
    if source.overridden:
        yield from ("", "[override]  # cannot be traced, since it looks at values: called as it is when the step runs")
        yield f"module = {to_toml(list(source.overridden))}"
    yield from ("", "[parallel]", f"dp_shard = {RANKS}  # ranks of the real job")
    if stages is not None:
        yield f"pp = {stages.count}  # times as many, for the stages of [pipeline]"
        yield from ("", "[pipeline]")
        yield f"cuts = {to_toml(list(stages.cuts))}" if stages.cuts else f"stages = {stages.count}"
        yield f"schedule = {to_toml(stages.schedule)}"
        yield from ("", "[step]", f"microbatches = {stages.microbatches or stages.count}")
    yield from ("", *bucket.lines({}))


# Does a first plan pass? Its step is traced, the pass is run and looked at, as pytest would; ranks are not started.


_INPUTS: Sequence[tuple[str | int, ...]] = ((0,), ("0.*",))
"""What a model may be given of a batch that it is not to have whole: the first item, or what is in it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A first plan, and what is still wrong with it; empty: nothing."""

    source: PlanSource
    problem: str = ""


def tried(source: PlanSource, bucket: Draft, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> Tried:
    """``source`` with what it needs to pass, if that is ``inputs`` or overrides of some of ``modules``."""
    first = _overriding(source, bucket, out, modules, say)
    if first.problem:
        for inputs in _INPUTS:
            other = _overriding(replace(first.source, inputs=inputs), bucket, out, modules, say)
            if not other.problem:
                return other
    return first


def _overriding(source: PlanSource, bucket: Draft, out: Path, modules: Mapping[str, type], say: Callable[[str], None]) -> Tried:
    """Modules that look at values are overridden, one after the other, until the step can be traced, or nothing helps."""
    now, said = source, ""
    for _ in range(MOST_OVERRIDES):
        (plan,) = parse_plans(plan_text(now, bucket), out.resolve())
        problem = first_failure(plan, ("audit", "collectives"), say, Path.cwd())
        if problem is None:
            return Tried(now)
        said = problem.said
        selector = problem.to_override(modules, now.overridden)
        if not selector:
            break
        now = replace(now, overridden=(*now.overridden, selector))
    return Tried(now, said)
