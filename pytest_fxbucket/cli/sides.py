"""A side of ``fxbucket diff``: a plan through a pass, as it is in the working tree or as it was at a commit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_fxbucket.cli.apart import TreePlace, environment_of, shown_apart, typed
from pytest_fxbucket.cli.show import folders_of, golden_file, tell
from pytest_fxbucket.commit import Commit, Repository, worktree_of
from pytest_fxbucket.errors import FxbucketError, GoldenError
from pytest_fxbucket.explain.find import find_plan, parts
from pytest_fxbucket.golden.store import parse
from pytest_fxbucket.plan.schema import Plan


@dataclass(frozen=True)
class InTree:
    """A plan as it is now; ``apart`` in a process of its own."""

    plan: Plan
    pass_name: str
    apart: bool = False

    @classmethod
    def of(cls, text: str, pass_name: str) -> InTree:
        """The plan that ``text`` names. Raises PlanError or UsageError."""
        return cls(find_plan(text)[0], pass_name)

    @property
    def label(self) -> str:
        """What to call it."""
        return typed(self.plan.path, self.plan.matrix_id)

    @property
    def what(self) -> tuple[object, ...]:
        """Equal for two sides that are one and the same."""
        return self.plan.path.resolve(), self.plan.matrix_id, self.pass_name

    @property
    def folders(self) -> list[Path]:
        """Where its modules are imported from."""
        return folders_of(self.plan)

    def schedule(self) -> str:
        """The body of the plan's golden. Raises FxbucketError."""
        if not self.apart:
            return parse(tell(self.plan, self.pass_name, golden_file), self.label)
        words = [typed(self.plan.path, self.plan.matrix_id), "--pass", self.pass_name]
        return parse(shown_apart(words, Path.cwd(), environment_of())[0], self.label)


@dataclass(frozen=True)
class AtCommit:
    """A plan as it was at ``commit``, with its model, its pass, and pytest_fxbucket itself where the repository holds that."""

    repository: Repository
    commit: Commit
    path: PurePosixPath
    row: str | None
    pass_name: str

    @classmethod
    def of(cls, text: str, pass_name: str, rev: str) -> AtCommit:
        """The plan that ``text`` names, which need not be there now. Raises FxbucketError if ``rev`` is not, or it lacks it."""
        file, row = parts(text)
        repository = Repository.of(file)
        commit, path = repository.commit(rev), repository.path_of(file)
        repository.require(path, commit)
        return cls(repository, commit, path, row, pass_name)

    @property
    def label(self) -> str:
        """What to call it."""
        return f"{typed(self.path, self.row)} at {self.commit}"

    @property
    def what(self) -> tuple[object, ...]:
        """Equal for two sides that are one and the same."""
        return self.repository.top, self.commit.sha, self.path, self.row, self.pass_name

    def schedule(self) -> str:
        """The body of the plan's golden. Raises FxbucketError."""
        with worktree_of(self.repository, self.commit) as tree:
            place = TreePlace.at_commit(self.repository, tree)
            try:
                return self._shown_in(place)
            except FxbucketError as error:
                raise FxbucketError(f"at {self.commit}: {place.cleared(str(error))}") from None

    def _shown_in(self, place: TreePlace) -> str:
        words = [typed(place.shown(self.path), self.row), "--pass", self.pass_name]
        shown, files = shown_apart(words, place.cwd, place.environment)
        place.refuse_others(files)
        try:
            return parse(shown, str(self.path))
        except GoldenError:
            raise FxbucketError(
                "the pytest_fxbucket there writes goldens of another format, which compare with none of ours"
            ) from None


DiffSide = InTree | AtCommit


def same_name(schedule: str) -> str:
    """``schedule`` without the name of its plan, which is no difference between two schedules."""
    return re.sub(r"^plan .*\n", "", schedule, count=1, flags=re.MULTILINE)
