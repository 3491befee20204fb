"""Where a process runs that is to see the files of a commit, or those of the working tree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_fxbucket.cli.apart import environment_of, from_working_tree
from pytest_fxbucket.commit.repository import OF_HOOKS, Repository
from pytest_fxbucket.errors import FxbucketError


@dataclass(frozen=True, slots=True)
class Place:
    """A folder to start in and an environment, in which modules come from one tree."""

    cwd: Path
    environment: Mapping[str, str]
    tree: Path | None = None
    """The worktree of a commit; None: the working tree."""
    repository: Repository | None = None
    """Of the commit."""

    @classmethod
    def here(cls) -> Place:
        """The working tree as it is."""
        return cls(Path.cwd(), environment_of())

    @classmethod
    def at_commit(cls, repository: Repository, tree: Path) -> Place:
        """The worktree ``tree`` of a commit, in the folder there that is the current one here, if there is such."""
        here = Path.cwd().resolve()
        cwd = tree / here.relative_to(repository.top) if here.is_relative_to(repository.top) else tree
        environment = {name: value for name, value in environment_of(repository.top, tree).items() if name not in OF_HOOKS}
        return cls(cwd if cwd.is_dir() else tree, environment, tree, repository)

    def shown(self, path: PurePosixPath) -> Path:
        """How ``path``, from the top of the tree, is written in the folder."""
        assert self.tree is not None
        return Path(os.path.relpath(self.tree / path, self.cwd))

    def cleared(self, said: str) -> str:
        """``said`` without the folder that nobody knows and that is gone soon."""
        return said.replace(f"{self.tree}{os.sep}", "") if self.tree is not None else said

    def refuse_others(self, imported: Sequence[str]) -> None:
        """Raise FxbucketError if something of a commit was read from the working tree: two equal things would be compared.

        ``imported``: files of all modules.
        """
        if self.repository is None:
            return
        wrong = self.repository.tracked(from_working_tree(imported, self.repository.top))
        if wrong:
            raise FxbucketError(
                f"{wrong[0]} was imported from the working tree: the commit lacks it, or has it in a submodule, or it is "
                "installed in place; put the folder that it is to be imported from on PYTHONPATH"
            )


def typed(path: Path | PurePosixPath, row: str | None) -> str:
    """A plan as it is typed."""
    return f"{path}::{row}" if row else str(path)
