"""The commit that is measured, and whether the files are still its."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.commit.repository import Repository
from pytest_fxbucket.errors import FxbucketError

_CODE = ("*.py", "*.toml")


def commit_of(file: Path, stored: tuple[str, ...] = (".benchmarks", ".fxbucket")) -> tuple[str | None, bool]:
    """Sha of HEAD in the repository of `file`, and whether files there differ from it; of new ones, code and plans only.

    (None, False) where there is no repository, no commit yet, or no git. What lies in folders of the names `stored`, at any
    depth, is not looked at: a run that stores its samples would make the next one dirty.
    """
    try:
        repository = Repository.of(file, "a benchmark")
        sha = repository.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
        but = [f":(top,exclude,glob)**/{name}/**" for name in stored]
        changed = repository.git("status", "--porcelain", "--untracked-files=no", "--", ":/", *but)
        new = repository.git("ls-files", "--others", "--exclude-standard", "--", *_CODE, *but)
    except FxbucketError:
        return None, False
    return sha, bool(changed or new)
