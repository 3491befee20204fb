"""Commits that hold the same but for stored runs: a run is committed after the commit that it measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pytest_fxbucket.commit.repository import Repository
from pytest_fxbucket.errors import FxbucketError


def same_files(repository: Repository, sha: str, folder: Path) -> Callable[[str], bool]:
    """Whether a commit differs from `sha` in nothing but stored runs below `folder`; False for one that is not there."""

    @cache
    def are_same(other: str) -> bool:
        but = _but_runs(folder.resolve(), repository.top)
        try:
            return not repository.git("diff", "--name-only", "--no-renames", "--end-of-options", other, sha, "--", ":/", *but)
        except FxbucketError:  # a clone that is shallow, or a commit that was never pushed
            return False

    return are_same


def _but_runs(folder: Path, top: Path) -> list[str]:
    """What leaves out files with names of runs below `folder`; all else there, such as code, counts."""
    if not folder.is_relative_to(top):
        return []
    literally = "".join(re.sub(r"([*?\[\\])", r"\\\1", part) + "/" for part in folder.relative_to(top).parts)
    return [f":(top,exclude,glob){literally}**/[0-9][0-9][0-9][0-9]*_*.json"]
