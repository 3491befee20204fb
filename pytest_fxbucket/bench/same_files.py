"""Commits that hold the same but for stored runs: a run is committed after the commit that it measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from pytest_fxbucket.commit.repository import Repository
from pytest_fxbucket.errors import FxbucketError


def same_files(repository: Repository, sha: str, folder: Path) -> Callable[[str], bool]:
    """Whether a commit differs from `sha` in nothing but `folder`, where runs are stored; False for one that is not there."""

    @cache
    def are_same(other: str) -> bool:
        where = folder.resolve()
        but = [f":(top,exclude){where.relative_to(repository.top).as_posix()}"] if where.is_relative_to(repository.top) else []
        try:
            return not repository.git("diff", "--name-only", "--no-renames", other, sha, "--", ":/", *but)
        except FxbucketError:  # a clone that is shallow, or a commit that was never pushed
            return False

    return are_same
