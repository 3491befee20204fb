"""The sides of ``fxbucket compare``: trees of commits, or the working tree, each with a pass and an interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.provenance import commit_of
from pytest_fxbucket.bench.side_by_side import NEW, OLD, Length, SideProcess, Start
from pytest_fxbucket.bench.side_by_side import run as run_sides
from pytest_fxbucket.bench.stats import ratio_of
from pytest_fxbucket.cli.apart import TreePlace, typed
from pytest_fxbucket.cli.benchmarked import Named
from pytest_fxbucket.cli.compared import SidesCompared
from pytest_fxbucket.commit import Commit, Repository, worktree_of
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.plan.schema import Benchmark

if TYPE_CHECKING:
    from pytest_fxbucket.bench.stats import Series


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of all plans."""

    variant: str
    backend: str | None
    confidence: float
    numbers: Mapping[str, float]
    """threshold, precision, budget_s: those that are not to be as the plan says."""

    def of(self, planned: Mapping[str, Any] | None) -> Benchmark:
        """The options of a plan whose own are ``planned``; None: it has none."""
        known = {name: value for name, value in (planned or {}).items() if name in Benchmark.__dataclass_fields__}
        return Benchmark(**{**known, **self.numbers})


@dataclass(frozen=True, slots=True)
class CommitTree:
    """The files of one side: of a commit, or the working tree."""

    label: str
    commit: Commit | None
    place: TreePlace
    repository: Repository

    @classmethod
    def of(cls, repository: Repository, commit: Commit | None, stack: ExitStack) -> CommitTree:
        """The files of ``commit``, which are there until ``stack`` is unwound; None: the working tree as it is."""
        if commit is not None:
            tree = stack.enter_context(worktree_of(repository, commit))
            return cls(str(commit), commit, TreePlace.at_commit(repository, tree), repository)
        sha, is_dirty = commit_of(repository.top / "file")
        at = f" at {sha[:7]}" if sha else ""
        return cls(
            f"the working tree{at}{', with uncommitted changes' if is_dirty else ''}", None, TreePlace.here(), repository
        )

    def lacks(self, plan: Named) -> bool:
        """Whether the commit has no such file."""
        return self.commit is not None and not self.repository.has(self.repository.path_of(plan.file), self.commit)

    def typed(self, plan: Named) -> str:
        """The plan as it is typed in the place. Raises FxbucketError if the commit lacks it."""
        if self.commit is None:
            return typed(plan.file, plan.row)
        path = self.repository.path_of(plan.file)
        self.repository.require(path, self.commit)
        return typed(self.place.shown(path), plan.row)


@dataclass(frozen=True, slots=True)
class CommitSide:
    """A tree, a pass and an interpreter."""

    tree: CommitTree
    pass_name: str
    python: str

    def start(self, plan: Named, asked: Asked) -> Start:
        """How its process is started."""
        request = {
            "plan": self.tree.typed(plan),
            "pass": self.pass_name,
            "backend": asked.backend,
            "variant": asked.variant,
        }
        return Start(f"at {self.tree.label}", self.python, self.tree.place.cwd, self.tree.place.environment, request)

    def facts(self, process: SideProcess) -> dict[str, Any]:
        """What it is going to run. Raises FxbucketError, also if it read modules of the wrong tree."""
        answer = process.answer()
        self.tree.place.refuse_others(answer["files"])
        commit = self.tree.commit
        return {"commit": commit.sha if commit is not None else None, "pass": self.pass_name, **answer["facts"]}


def plan_compared(plan: Named, sides: Sequence[CommitSide], asked: Asked, say: Callable[[str], None]) -> SidesCompared:
    """Run both sides of ``plan``. Raises BenchmarkError of one sentence that names the plan."""
    try:
        return _compared(plan, sides, asked, say)
    except FxbucketError as error:
        said = str(error)
        for side in sides:
            said = side.tree.place.cleared(said)
        raise BenchmarkError(f"{typed(plan.file, plan.row)}: {said}") from None


def _compared(plan: Named, sides: Sequence[CommitSide], asked: Asked, say: Callable[[str], None]) -> SidesCompared:
    starts = [side.start(plan, asked) for side in sides]
    with ExitStack() as stack:
        say("both sides trace the step")
        old, new = (stack.enter_context(SideProcess(start)) for start in starts)
        facts = sides[0].facts(old), sides[1].facts(new)
        benchmark = asked.of(facts[1]["benchmark"])

        def is_enough(series: Series) -> bool:
            estimate = ratio_of(series.samples[NEW], series.samples[OLD], confidence=asked.confidence)
            return estimate.half_width <= benchmark.precision

        series = run_sides((old, new), Length(benchmark.budget_s), is_enough, say)
    estimate = ratio_of(series.samples[NEW], series.samples[OLD], confidence=asked.confidence)
    labels = sides[0].tree.label, sides[1].tree.label
    return SidesCompared(typed(plan.file, plan.row), labels, facts, series, estimate, benchmark.threshold)
