"""A commit's files in a git worktree of its own, outside the repository, for as long as a block runs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fxbucket.commit.repository import Commit, Repository
from pytest_fxbucket.errors import FxbucketError

# Checking out runs no hook, asks no server for large files, and takes all folders, whatever the user's own tree leaves out.
_PLAIN = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.sparseCheckout=false", "-c", "submodule.recurse=false")
_NO_SMUDGE = {"GIT_LFS_SKIP_SMUDGE": "1"}


@contextmanager
def worktree_of(repository: Repository, commit: Commit) -> Iterator[Path]:
    """Give a folder with the files of ``commit``, and take folder and worktree away in the end, whatever happens.

    Nothing of the user's working tree, index or branches is touched. Submodules are left empty. Raises FxbucketError with what
    git says.
    """
    outer = Path(tempfile.mkdtemp(prefix="fxbucket-", dir=_outside(repository.top)))
    tree = outer / f"{repository.top.name}-{outer.name.removeprefix('fxbucket-')}"
    at = Repository(repository.top, {**repository.environment, **_NO_SMUDGE})
    try:
        try:
            at.git(*_PLAIN, "worktree", "add", "--quiet", "--detach", str(tree), commit.sha)
            yield tree.resolve()
        finally:
            _remove(repository, tree, outer)
    except BaseException:
        _remove(repository, tree, outer)  # a signal may have stopped the removing too, and after a first one others are ignored
        raise


def _remove(repository: Repository, tree: Path, outer: Path) -> None:
    """Remove the worktree, which git may have made only in part, and its folder."""
    shutil.rmtree(tree, ignore_errors=True)
    try:
        if str(tree) in repository.git("worktree", "list", "--porcelain"):
            repository.git("worktree", "remove", "--force", "--force", str(tree))
    except FxbucketError as error:
        print(f"fxbucket: the worktree {tree} is still known to git, remove it by git worktree prune: {error}", file=sys.stderr)
    shutil.rmtree(outer, ignore_errors=True)


def _outside(top: Path) -> Path:
    """A folder for temporary files that is not in the repository, whose settings would count for the worktree too."""
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), top.parent]
    found = next((place for place in places if not place.resolve().is_relative_to(top) and os.access(place, os.W_OK)), None)
    if found is None:
        raise FxbucketError(f"there is no folder outside {top} to put a worktree in; set TMPDIR to one")
    return found.resolve()
