"""``fxbucket diff A [B]``: how the schedules of two plans, two passes or two commits differ; without ranks."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.cli.common import PLAN_HELP, add_for_sides, refuse_no_pass, status_of, typed, up_to_two
from pytest_fxbucket.cli.separate_process import SourceTree, environment_of, shown_separately
from pytest_fxbucket.cli.show import golden_file, shown
from pytest_fxbucket.commit import Commit, Repository, worktree_of
from pytest_fxbucket.errors import FxbucketError, GoldenError, UsageError
from pytest_fxbucket.explain.find import find_plan, parts
from pytest_fxbucket.golden.store import parse
from pytest_fxbucket.plan.folders import folders_of, root_of
from pytest_fxbucket.plan.schema import Plan

_SAME, _DIFFERENT, _FAILED = 0, 1, 2


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``fxbucket diff``."""
    parser.add_argument("a", metavar="A[::ROW]", help=PLAN_HELP)
    parser.add_argument("b", metavar="B[::ROW]", nargs="?", help="the plan to compare it with; left out: A itself")
    passes = "manual (the default), torch or module:callable, for both sides; given twice, the second is for the second side"
    add_for_sides(parser, "--pass", "passes", "PASS", passes)
    revs = "the first side as it was at a commit, the second as it is now; given twice, each at its own"
    add_for_sides(parser, "--at", "revs", "REV", revs)


def run(options: Namespace) -> int:
    """Print what changed; gives 0 for the same schedule, 1 for another one, 2 if that could not be told."""
    return status_of(lambda: _compared(options), _FAILED)


def _compared(options: Namespace) -> int:
    a, b = _sides(options)
    old, new = without_name(a.schedule()), without_name(b.schedule())
    if old == new:
        print("same")
        return _SAME
    said = options.passes and a.pass_name != b.pass_name
    passes = [f" by pass {side.pass_name}" if said else "" for side in (a, b)]
    for line in _changes(old, new, (a.label + passes[0], b.label + passes[1]), _folder(options.a)):
        print(line)
    return _DIFFERENT


def without_name(schedule: str) -> str:
    """``schedule`` without the name of its plan, which is no difference between two schedules."""
    return re.sub(r"^plan .*\n", "", schedule, count=1, flags=re.MULTILINE)


def _changes(old: str, new: str, names: tuple[str, str], folder: Folder) -> list[str]:
    """The changes in words, and a diff; a long diff is written whole to a file, if a folder can be made."""
    from pytest_fxbucket.golden.mismatch import change_lines

    try:
        whole = folder.make() / "whole.diff"
    except OSError:
        return change_lines(old, new, names)
    lines = change_lines(old, new, names, whole)
    # A short diff is all in the lines, and then the folder is not needed.
    if not whole.exists():
        folder.clear()
    return lines


def _folder(plan: str) -> Folder:
    file, row = parts(plan)
    root = root_of(file)
    return Folder(root / ".fxbucket", f"{os.path.relpath(file.resolve(), root)} {row or ''}", "diff")


def _sides(options: Namespace) -> tuple[DiffSide, DiffSide]:
    """Both sides, so far as they can be known before either is traced. Raises UsageError if they are one and the same."""
    refuse_no_pass(*options.passes)
    passes: list[str | None] = [*up_to_two("--pass", options.passes)] or [None]
    revs = up_to_two("--at", options.revs)
    # One --pass is for both sides, but one --at for the first alone: the second is then as it is now.
    a = _side(options.a, passes[0], revs[0] if revs else None)
    b = _side(options.b or options.a, passes[-1], revs[1] if len(revs) == 2 else None)
    if a.identity == b.identity:
        raise UsageError(
            f"there is nothing to compare: both sides are {a.label} by {_by(a)}; give a second plan, --pass twice, "
            "or --at with the commit to compare with"
        )
    if isinstance(a, PlanNow) and isinstance(b, PlanNow) and folders_of(a.plan.path) != folders_of(b.plan.path):
        # Each folder may have a module of the same name, and one process imports only one of them.
        b = replace(b, is_separate=True)
    return a, b


def _by(side: DiffSide) -> str:
    return f"pass {side.pass_name}" if side.pass_name else "its own pass"


def _side(plan: str, pass_name: str | None, rev: str | None) -> DiffSide:
    if rev is not None:
        return PlanAtCommit.of(plan, pass_name, rev)
    found = find_plan(plan)[0]
    return PlanNow(found, pass_name or found.pass_name)


@dataclass(frozen=True)
class PlanNow:
    """A side: a plan through a pass as it is now, in a process of its own if it ``is_separate``."""

    plan: Plan
    pass_name: str
    is_separate: bool = False

    @property
    def label(self) -> str:
        """What to call it."""
        return typed(self.plan.path, self.plan.matrix_id)

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two sides that are one and the same."""
        return self.plan.path.resolve(), self.plan.matrix_id, self.pass_name

    def schedule(self) -> str:
        """The body of the plan's golden. Raises FxbucketError."""
        if not self.is_separate:
            return parse(shown(self.plan, self.pass_name, golden_file), self.label)
        text, _ = shown_separately([self.label, "--pass", self.pass_name], Path.cwd(), environment_of())
        return parse(text, self.label)


@dataclass(frozen=True)
class PlanAtCommit:
    """A side as it was at ``commit``: plan, model, pass, and pytest_fxbucket itself where the repository holds that."""

    repository: Repository
    commit: Commit
    file: Path
    """The plan file as it is named here; it need not exist now."""
    path: PurePosixPath
    """From the top of the repository."""
    row: str | None
    pass_name: str | None
    """None: the one that the plan there names."""

    @classmethod
    def of(cls, text: str, pass_name: str | None, rev: str) -> PlanAtCommit:
        """The plan that ``text`` names, which need not exist now. Raises FxbucketError if ``rev`` is no commit or lacks it."""
        file, row = parts(text)
        repository = Repository.of(file)
        commit, path = repository.commit(rev), repository.path_of(file)
        repository.require(path, commit)
        return cls(repository, commit, file, path, row, pass_name)

    @property
    def label(self) -> str:
        """What to call it."""
        return f"{typed(self.path, self.row)} at {self.commit}"

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two sides that are one and the same."""
        return self.repository.top, self.commit.sha, self.path, self.row, self.pass_name

    def schedule(self) -> str:
        """The body of the plan's golden. Raises FxbucketError."""
        with worktree_of(self.repository, self.commit) as worktree:
            tree = SourceTree.at_commit(self.repository, self.commit, worktree)
            try:
                words = [tree.typed(self.file, self.row), *(["--pass", self.pass_name] if self.pass_name else [])]
                text, imported = shown_separately(words, tree.cwd, tree.environment)
                tree.refuse_others(imported)
                return parse(text, str(self.path))
            except GoldenError:
                raise FxbucketError(
                    f"at {self.commit}: the pytest_fxbucket there writes goldens of another format, which compare with none "
                    "of ours"
                ) from None
            except FxbucketError as error:
                raise FxbucketError(f"at {self.commit}: {tree.cleared(str(error))}") from None


DiffSide = PlanNow | PlanAtCommit
