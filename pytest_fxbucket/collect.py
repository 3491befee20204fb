"""Plan files become pytest items: one for each check, or one named `plan` that fails for what cannot be loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.body.item import is_marked
from pytest_fxbucket.errors import FxbucketError, PlanError
from pytest_fxbucket.session import fx_session, key_of
from pytest_fxbucket.terminal import error_text, failure_lines, parts_of

if TYPE_CHECKING:
    from pytest_fxbucket.checks.verdict import Verdict
    from pytest_fxbucket.plan.load import BrokenRow
    from pytest_fxbucket.plan.schema import Plan

FIXTURES_WITH_RANKS = frozenset({"fxbucket_ranks", "fxbucket_check", "fxbucket_benchmark"})


@dataclass(frozen=True, slots=True)
class PlanRef:
    """A plan by file and matrix id, without having been loaded; the parameter of `fxbucket_plan`."""

    path: Path
    matrix_id: str | None = None

    def load(self) -> Plan:
        """Return the plan; PlanError if the file cannot be loaded or has no such matrix row."""
        from pytest_fxbucket.plan.load import BrokenRow, load_rows

        found = {row_of(one): one for one in load_rows(self.path)}
        if self.matrix_id not in found:
            known = ", ".join(name for name in found if name) or "none"
            raise PlanError(f"{self.path}: no [[matrix]] row has the id {self.matrix_id!r}; rows there: {known}")
        plan = found[self.matrix_id]
        if isinstance(plan, BrokenRow):
            raise plan.error
        return plan


class PlanFile(pytest.File):
    """A plan file that was named, by option or argument."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield an item for each enabled check of the plan and of each matrix row; one for what cannot be loaded."""
        from pytest_fxbucket.plan.load import BrokenRow, load_rows

        try:
            found = load_rows(self.path)
        except FxbucketError as error:
            yield self._broken("plan", error)
            return
        from pytest_fxbucket.run import item_names

        for plan in found:
            if isinstance(plan, BrokenRow):
                yield self._broken(f"plan[{plan.name}]", plan.error)
                continue
            for name in item_names(plan):
                yield _item(self, name, plan)

    def _broken(self, name: str, error: FxbucketError) -> BrokenPlan:
        broken: BrokenPlan = BrokenPlan.from_parent(self, name=name, reason=str(error).replace(f"{self.config.rootpath}/", ""))
        return broken


class BrokenPlan(pytest.Item):
    """The one item of a plan file, or of a row of it, that cannot be loaded, so that other plans still run."""

    def __init__(self, *, reason: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def runtest(self) -> None:
        """Fail with the sentence that says what is wrong with the file."""
        pytest.fail(self.reason, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the item is from, and what its failure is headed with."""
        return place(self)


class OfPlan(pytest.Item):
    """What all items of a plan are: of one check."""

    def __init__(self, *, plan: Plan, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        self.check = self.name.partition("[")[0].partition("@")[0].partition(":")[0]
        self.verdict: Verdict | None = None


class PlanItem(OfPlan):
    """One check of one plan."""

    def runtest(self) -> None:
        """Run the check: a failed one fails with its lines, one that could not run with its sentence."""
        __tracebackhide__ = True
        told = self._check()
        if told is not None:
            pytest.fail(told, pytrace=False)
        if self.verdict is not None and self.verdict.outcome == "skipped":
            pytest.skip(f"{self.name}: {self.verdict.summary}")

    def _check(self) -> str | None:
        """Set the verdict; return what to fail with, if anything."""
        __tracebackhide__ = True
        fx = fx_session(self.config)
        try:
            with fx.progress.watching(self.nodeid):
                self.verdict = fx.run_of(self.plan).check(self.check)
        except FxbucketError as error:
            return error_text(error).replace(f"{self.config.rootpath}/", "")
        self.user_properties.append(("fxbucket", self.verdict.summary))
        return "\n".join(failure_lines(self.verdict)) if self.verdict.outcome == "failed" else None

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show an error that nobody foresaw from the check on, without pytest's own frames."""
        if isinstance(excinfo.value, pytest.fail.Exception):
            return super().repr_failure(excinfo, style)
        excinfo.traceback = excinfo.traceback.cut(path=Path(__file__)).filter(excinfo)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the item is from, and what its failure is headed with."""
        return place(self)


def _item(parent: PlanFile, name: str, plan: Plan) -> pytest.Item:
    """Return the item of a plan that is called `name`."""
    if name.startswith("benchmark"):
        from pytest_fxbucket.benchmark_item import BenchmarkItem

        return BenchmarkItem.of(parent, name, plan)
    return PlanItem.from_parent(parent, name=name, plan=plan)


def place(item: pytest.Item) -> tuple[Path, int, str]:
    """Return file, line and heading; the line is 0, not None, which junit and xdist would trip over."""
    return item.path, 0, f"{parts_of(item.nodeid)[0]}: {item.name}"


def plan_file(path: Path, parent: pytest.Collector) -> PlanFile | None:
    """Return a collector for a plan file that was named; other TOML files are none of ours."""
    if path.suffix != ".toml" or not parent.session.isinitpath(path):
        return None
    return plan_collector(path, parent)


def plan_collector(path: Path, parent: pytest.Collector) -> PlanFile:
    """Return a collector for the plan file at `path`."""
    rootdir = parent.config.rootpath
    if path.is_relative_to(rootdir):
        return PlanFile.from_parent(parent, path=path)
    # pytest would give every file outside rootdir an empty node id
    return PlanFile.from_parent(parent, path=path, nodeid=Path(os.path.relpath(path, rootdir)).as_posix())


def plan_params(paths: Iterable[Path], rootdir: Path) -> Iterator[tuple[str, PlanRef]]:
    """Yield (test id, PlanRef) for each plan and matrix row; what cannot be loaded gives one, to fail later."""
    from pytest_fxbucket.plan.load import load_rows

    for path in paths:
        shown = Path(os.path.relpath(path, rootdir)).as_posix()
        try:
            rows = [row_of(one) for one in load_rows(path)]
        except FxbucketError:
            rows = [None]
        for row in rows:
            yield f"{shown}-{row}" if row else shown, PlanRef(path, row)


def row_of(one: Plan | BrokenRow) -> str | None:
    """Return the id of the row that a plan is of, or what stands for it; None above the rows."""
    from pytest_fxbucket.plan.load import BrokenRow

    return one.name if isinstance(one, BrokenRow) else one.matrix_id


def needs_ranks(item: pytest.Item) -> bool:
    """Say whether an item will run functions on ranks."""
    if isinstance(item, OfPlan):
        from pytest_fxbucket.checks.registry import ON_RANKS

        return item.check in ON_RANKS
    return is_marked(item) or not FIXTURES_WITH_RANKS.isdisjoint(getattr(item, "fixturenames", ()))


def is_last_of_plan(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Say whether `following` leaves the plan that `item` belongs to."""
    if not isinstance(item, OfPlan):
        return False
    return not isinstance(following, OfPlan) or key_of(following.plan) != key_of(item.plan)
