"""``fxbucket compare REF [REF2]``: step time of two commits side by side on this machine, in turns; in words or as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pytest_fxbucket.backends import CHOICES
from pytest_fxbucket.bench.provenance import commit_of
from pytest_fxbucket.bench.side_by_side import NEW, OLD, RunLength, SideProcess, SideStart
from pytest_fxbucket.bench.side_by_side import run as run_sides
from pytest_fxbucket.bench.stats import ratio_of
from pytest_fxbucket.bench.store import workload_changes
from pytest_fxbucket.cli.benchmarked_plans import NamedPlan, named_plans
from pytest_fxbucket.cli.common import add_for_sides, refuse_no_pass, status_of, up_to_two
from pytest_fxbucket.cli.separate_process import SourceTree
from pytest_fxbucket.commit import Commit, Repository, worktree_of
from pytest_fxbucket.errors import BenchmarkError, FxbucketError, UsageError
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.progress import on_stderr

if TYPE_CHECKING:
    from pytest_fxbucket.bench.stats import Estimate, Series

_NOT_SLOWER, _SLOWER, _UNTOLD = 0, 1, 2
_D = TypeVar("_D", str, None)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket compare``."""
    parser.add_argument("ref", metavar="REF", help="the commit to compare with")
    parser.add_argument("ref2", metavar="REF2", nargs="?", help="the commit to judge; left out: the working tree as it is")
    parser.add_argument(
        "--plan",
        dest="plans",
        action="append",
        default=[],
        metavar="PATH[::ROW]",
        help="plan file, or a folder: all plans below that have the benchmark on; repeatable; left out: ini fxbucket_plans",
    )
    parser.add_argument(
        "--threshold", metavar="F", help="fraction of the step; smaller differences are none (default: the plan's)"
    )
    parser.add_argument("--budget-s", metavar="S", help="seconds of steps for each plan (default: the plan's)")
    parser.add_argument(
        "--precision", metavar="F", help="half width of the interval at which it ends early (default: the plan's)"
    )
    parser.add_argument("--confidence", metavar="F", default="0.99", help="of the interval that tells a difference from noise")
    parser.add_argument("--variant", choices=("bucketed", "unbucketed"), default="bucketed", help="which step is timed")
    parser.add_argument("--backend", choices=CHOICES, help="process group back end instead of the plan's")
    add_for_sides(parser, "--pass", "passes", "PASS", "as for fxbucket diff; twice: one for each side")
    add_for_sides(parser, "--python", "pythons", "PATH", "interpreter of both sides; twice: one for each")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, with every sample")


def run(options: Namespace) -> int:
    """Print what is faster; gives 0 if the second side is not slower, 1 if it is, 2 if that could not be told."""
    return status_of(lambda: _compared(options), _UNTOLD)


def _compared(options: Namespace) -> int:
    asked = _options_of(options)
    passes, pythons = _two("--pass", options.passes, None), _two("--python", _from_here(options.pythons), sys.executable)
    refuse_no_pass(*passes)
    plans = named_plans(options.plans)
    repository = Repository.of(plans[0].file, "REF")
    commits = repository.commit(options.ref), repository.commit(options.ref2) if options.ref2 is not None else None
    found: list[SidesCompared] = []
    problems: list[str] = []
    with ExitStack() as stack:
        trees = [_tree(repository, commit, stack) for commit in commits]
        # Turned twice: to columns of trees and labels, beside which passes and interpreters are columns, and back to two sides.
        sides = [CommitSide(*one) for one in zip(*zip(*trees, strict=True), passes, pythons, strict=True)]
        for plan in plans:
            # A plan that was named itself is not passed over: it becomes an error when a side is started without it.
            lacking = next((side.label for side in sides if plan.is_found and side.tree.lacks(plan.file, plan.row)), None)
            if lacking is not None:
                print(f"fxbucket: {plan.typed} is passed over, since it is not in {lacking}", file=sys.stderr)
                continue
            progress = on_stderr()
            try:
                with progress.watching(plan.typed):
                    found.append(_plan_compared(plan, sides, asked, progress.say))
            except FxbucketError as error:
                problems.append(str(error))
                print(f"fxbucket: {error}", file=sys.stderr, flush=True)
                continue
            if not options.json:
                print("\n".join(found[-1].lines()), flush=True)
    if options.json:
        print(json.dumps({"format": 1, "plans": [one.plain() for one in found], "problems": problems}, indent=1))
    if commits[1] is not None and commits[0].sha == commits[1].sha:
        print("both sides are one commit: what is seen is noise", file=sys.stderr)
    # One plan that is slower decides, even if others could not be compared.
    if any(one.verdict == "slower" for one in found):
        return _SLOWER
    return _UNTOLD if problems or not found else _NOT_SLOWER


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of the command line that hold for all plans."""

    variant: str
    backend: str | None
    confidence: float
    numbers: Mapping[str, float]
    """Values for threshold, precision and budget_s that replace the plan's."""

    def of(self, planned: Mapping[str, Any] | None) -> Benchmark:
        """The options of a plan whose own are ``planned``; None: it has none."""
        # The pytest_fxbucket of another commit may have options that this one does not know.
        known = {name: value for name, value in (planned or {}).items() if name in Benchmark.__dataclass_fields__}
        return Benchmark(**{**known, **self.numbers})


def _options_of(options: Namespace) -> CompareOptions:
    fraction = "a fraction of the step below 1, such as 0.03 for 3 %"
    limits = {"threshold": (0.0, 1.0, fraction), "precision": (0.0, 1.0, fraction), "budget_s": (0.0, math.inf, "seconds")}
    given = {name: getattr(options, name) for name in limits}
    numbers = {name: _number(name, text, *limits[name]) for name, text in given.items() if text is not None}
    confidence = _number("confidence", options.confidence, 0.5, 1.0, "a number from 0.5 to 1, such as 0.99")
    return CompareOptions(options.variant, options.backend, confidence, numbers)


def _number(name: str, text: str, low: float, high: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # No comparison with nan is true, so this refuses nan, and what is no number at all.
    if not low <= value < high:
        raise UsageError(f"--{name.replace('_', '-')} {text}: expected {expected}")
    return value


def _from_here(pythons: Sequence[str]) -> list[str]:
    """Interpreters as any folder finds them: each side is started in a tree of its own. Links stay, such as a venv's."""
    return [os.path.abspath(path) if os.path.dirname(path) else path for path in pythons]


def _two(option: str, given: list[str], default: _D) -> tuple[str | _D, str | _D]:
    both: list[str | _D] = [*up_to_two(option, given)] or [default]
    return both[0], both[-1]


def _tree(repository: Repository, commit: Commit | None, stack: ExitStack) -> tuple[SourceTree, str]:
    """The files of ``commit``, there until ``stack`` is unwound, or the working tree as it is; and what to call them."""
    if commit is not None:
        return SourceTree.at_commit(repository, commit, stack.enter_context(worktree_of(repository, commit))), str(commit)
    sha, is_dirty = commit_of(repository.top / "file")
    at = f" at {sha[:7]}" if sha else ""
    return SourceTree.here(), f"the working tree{at}{', with uncommitted changes' if is_dirty else ''}"


@dataclass(frozen=True, slots=True)
class CommitSide:
    """A tree, what to call it, a pass and an interpreter."""

    tree: SourceTree
    label: str
    pass_name: str | None
    """None: the one that the plan there names."""
    python: str

    def start(self, plan: NamedPlan, asked: CompareOptions) -> SideStart:
        """How its process is started."""
        request = {
            "plan": self.tree.typed(plan.file, plan.row),
            "pass": self.pass_name or "manual",
            # "as_planned" overrides "pass", which then only counts at a commit that does not know the former.
            "as_planned": self.pass_name is None,
            "backend": asked.backend,
            "variant": asked.variant,
        }
        return SideStart(f"at {self.label}", self.python, self.tree.cwd, self.tree.environment, request)

    def facts(self, process: SideProcess) -> dict[str, Any]:
        """What the process is going to run. Raises FxbucketError, also if it imported modules of the wrong tree."""
        answer = process.answer()
        self.tree.refuse_others(answer["files"])
        # The side's own word on its pass comes last: only it knows what the plan there names.
        return {"commit": self.tree.commit and self.tree.commit.sha, "pass": self.pass_name or "manual", **answer["facts"]}


def _plan_compared(
    plan: NamedPlan, sides: Sequence[CommitSide], asked: CompareOptions, say: Callable[[str], None]
) -> SidesCompared:
    """Run both sides of ``plan``. Raises BenchmarkError of one sentence that names the plan."""
    try:
        starts = [side.start(plan, asked) for side in sides]
        with ExitStack() as stack:
            # Both processes are started before the first is asked for its facts, so that they trace at the same time.
            say("both sides trace the step")
            old, new = (stack.enter_context(SideProcess(start)) for start in starts)
            facts = sides[0].facts(old), sides[1].facts(new)
            _refuse_other_work(*facts)
            # By the second side's plan, since that side is judged.
            benchmark = asked.of(facts[1]["benchmark"])
            series = run_sides(
                (old, new),
                RunLength(benchmark.budget_s),
                lambda so_far: new_by_old(so_far, asked.confidence).half_width <= benchmark.precision,
                say,
            )
        labels = sides[0].label, sides[1].label
        return SidesCompared(plan.typed, labels, facts, series, new_by_old(series, asked.confidence), benchmark.threshold)
    except FxbucketError as error:
        said = str(error)
        for side in sides:
            said = side.tree.cleared(said)
        raise BenchmarkError(f"{plan.typed}: {said}") from None


SideFacts = Mapping[str, Any]


def _refuse_other_work(old: SideFacts, new: SideFacts) -> None:
    """Raises BenchmarkError where the unbucketed step is another one by plan: that one is faster tells nothing of the other."""
    if "workload" in old and "workload" in new:  # which older versions do not say
        reasons = list(workload_changes(old["workload"], new["workload"]))
        if reasons:
            raise BenchmarkError(f"not comparable, the sides have other work to do: {'; '.join(reasons)}")


def new_by_old(series: Series, confidence: float) -> Estimate:
    """Estimate of log(new / old) of the step times in ``series``."""
    return ratio_of(series.samples[NEW], series.samples[OLD], confidence=confidence)


@dataclass(frozen=True, slots=True)
class SidesCompared:
    """Both sides of one plan, their samples, and the ratio of the second's step time to the first's."""

    plan: str
    labels: tuple[str, str]
    facts: tuple[SideFacts, SideFacts]
    series: Series
    """Samples of the variants ``old`` and ``new``."""
    estimate: Estimate
    """Estimate of log(new / old)."""
    threshold: float
    """Fraction of the step; smaller differences are none."""

    @property
    def verdict(self) -> Literal["slower", "faster", "same"]:
        """Slower or faster only if by more than the threshold and beyond the noise."""
        if self.estimate.is_slower(self.threshold):
            return "slower"
        if self.estimate.is_faster(self.threshold):
            return "faster"
        return "same"

    def lines(self) -> Iterator[str]:
        """What people read: the verdict first."""
        (old, new), one = self.labels, self.estimate
        interval = f"{100 * one.confidence:g} % interval {_percent(one.low)} to {_percent(one.high)}"
        change = f"{_percent(one.log_ratio)}; {interval}; threshold {100 * self.threshold:g} %"
        if self.verdict == "same":
            yield f"{self.plan}: no difference beyond the noise between {new} and {old} ({change})"
        else:
            yield f"{self.plan}: {new} is {self.verdict} than {old} ({change})"
        for name, label, facts in zip((OLD, NEW), self.labels, self.facts, strict=True):
            step_ms = 1e3 * median(self.series.all_of(name))
            backend = facts["backend"].removesuffix(":plain")
            yield f"  {label}: {step_ms:.2f} ms a step, {facts['ranks']} ranks over {backend}, torch {facts['torch']}"
        sets = self.series.samples[OLD]
        yield f"  {sum(map(len, sets))} steps of each side in {len(sets)} sets of processes, in turns"
        yield from (f"  {note}" for note in self._notes())

    def plain(self) -> dict[str, Any]:
        """The same and every sample, for JSON; times in seconds, ratios as log(new / old)."""
        one = self.estimate
        return {
            "plan": self.plan,
            "verdict": self.verdict,
            "log_ratio": one.log_ratio,
            "low": one.low,
            "high": one.high,
            "confidence": one.confidence,
            "threshold": self.threshold,
            "sides": [
                {
                    "label": label,
                    **facts,
                    "samples_s": self.series.samples[name],
                    "peak_bytes": self.series.peak_bytes[name],
                }
                for name, label, facts in zip((OLD, NEW), self.labels, self.facts, strict=True)
            ],
            "warmup_rounds": self.series.warmup_rounds,
            "has_priority": self.series.has_priority,
            "is_stable": self.series.is_stable,
        }

    def _notes(self) -> Iterator[str]:
        old, new = self.facts
        if old["digest"] == new["digest"]:
            yield "both sides run the same graph"
        elif old.get("traced") != new.get("traced") and "traced" in old and "traced" in new:
            yield "the step before the pass differs, too: by code of the model, or of what captures it"
        for what in ("ranks", "backend", "torch", "python"):
            if old[what] != new[what]:
                yield f"{what} differ: {old[what]} and {new[what]}"
        if not self.series.has_priority:
            yield "the ranks had no real-time priority, which ulimit -r 2 would allow: there is more noise than need be"
        if not self.series.is_stable:
            yield "step time had not settled when sampling began"
        # The estimate is a logarithm of a ratio, the threshold a fraction of the step.
        if self.verdict == "same" and self.estimate.high > math.log1p(self.threshold):
            yield (
                f"the noise here is such that a loss of {_percent(self.estimate.high)} cannot be ruled out; "
                "a larger --budget-s narrows it"
            )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.1f} %"
