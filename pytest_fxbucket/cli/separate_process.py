"""``fxbucket show`` in a process of its own: on a commit's files, or where two plans import modules of equal names."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.cli.common import typed
from pytest_fxbucket.commit import OF_HOOKS, Commit, Repository, finished
from pytest_fxbucket.errors import FxbucketError, PlanError
from pytest_fxbucket.plan.load import BrokenRow, load_rows
from pytest_fxbucket.progress import on_stderr

# Runs the command as python -m does, and then writes the files of all imported modules into a report.
# By vars(), and of plain modules alone: lazy ones would import something when they are asked for an attribute.
_SHOW = """
import runpy, sys
report, sys.argv = sys.argv[1], ["fxbucket", *sys.argv[2:]]
try:
    runpy.run_module("pytest_fxbucket.cli", run_name="__main__", alter_sys=True)
finally:
    found = [vars(module).get("__file__") for module in list(sys.modules.values()) if type(module) is type(sys)]
    with open(report, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\\0".join(path for path in found if isinstance(path, str)))
"""


def shown_separately(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """What ``fxbucket show WORDS`` prints in ``cwd``, by this interpreter, and the files of all modules that it imported.

    Raises FxbucketError with the sentence that it failed with.
    """
    handle, report = tempfile.mkstemp(prefix="fxbucket-")
    os.close(handle)
    progress = on_stderr()
    try:
        with progress.watching(words[0]):
            progress.say("runs in a process of its own")
            # -P keeps the working folder off the path, so that modules come only from where PYTHONPATH says.
            command = [sys.executable, "-P", "-c", _SHOW, report, "show", *words]
            done = finished(command, cwd, {**environment, "PYTHONIOENCODING": "utf-8"})
        # A user's module may end the process with status 0: two sides without a word would be equal.
        if done.returncode != 0 or not done.stdout:
            raise FxbucketError(_why(done.returncode, done.stderr))
        return done.stdout, Path(report).read_text(encoding="utf-8", errors="surrogateescape").split("\0")
    finally:
        os.unlink(report)


def environment_of(top: Path | None = None, tree: Path | None = None) -> dict[str, str]:
    """This process's environment for another one, in which what is imported from below ``top`` comes from ``tree``.

    PYTHONPATH gets the folders that this process has on its path below ``top``, as they are in ``tree``: before all else,
    since packages that are installed in place (``pip install -e``) would otherwise be those of the working tree. A package
    pytest_fxbucket at the top of ``tree`` is the one that is run there.
    """
    # What was on PYTHONPATH stays, but for entries below top, which move to the tree. This package follows, unless it is
    # installed, where it is found anyway. Environments below top are left alone: _is_below does not count them as part of it.
    given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    home = str(Path(__file__).parents[2])
    entries = [entry for entry in given if not _is_below(entry, top)]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if home not in installed and not _is_below(home, top):
        entries.append(home)
    if top is not None and tree is not None:
        ours = [entry for entry in (*given, *map(os.path.abspath, sys.path), home) if _is_below(entry, top)]
        if (tree / "pytest_fxbucket" / "__init__.py").is_file():
            ours = [str(top), *ours]
        entries = [str(tree / Path(os.path.realpath(entry)).relative_to(top)) for entry in ours] + entries
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries))}


def _is_below(place: str, top: Path | None) -> bool:
    """Whether a file or folder belongs to ``top`` and not to an environment that is installed there."""
    real = Path(os.path.realpath(place))
    return top is not None and real.is_relative_to(top) and not real.is_relative_to(Path(sys.prefix).resolve())


def _why(status: int, stderr: str) -> str:
    """The sentence with which a command failed; without one its status, and the last line that it wrote."""
    # As argparse says it at a commit that is older than the command.
    if "invalid choice: 'show'" in stderr:
        return "the pytest_fxbucket there has no command show, so there is nothing to compare with"
    lines = [line for line in stderr.splitlines() if line.strip()]
    sentences = [line.removeprefix("fxbucket: ") for line in lines if line.startswith("fxbucket: ")]
    if sentences:
        return sentences[-1]
    ended = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"fxbucket show ended {ended}" + (f": {lines[-1].strip()}" if lines else "")


@dataclass(frozen=True, slots=True)
class SourceTree:
    """Folder and environment for a process that is to see the files of a commit, or those of the working tree."""

    cwd: Path
    environment: Mapping[str, str]
    commit: Commit | None = None
    """None: the working tree."""
    repository: Repository | None = None
    """Of the commit."""
    worktree: Path | None = None
    """With the commit's files."""

    @classmethod
    def here(cls) -> SourceTree:
        """The working tree as it is."""
        return cls(Path.cwd(), environment_of())

    @classmethod
    def at_commit(cls, repository: Repository, commit: Commit, worktree: Path) -> SourceTree:
        """The ``worktree`` of a commit; a process starts in the counterpart of the current folder there, or else at its top."""
        here = Path.cwd().resolve()
        cwd = worktree / here.relative_to(repository.top) if here.is_relative_to(repository.top) else worktree
        environment = {name: text for name, text in environment_of(repository.top, worktree).items() if name not in OF_HOOKS}
        return cls(cwd if cwd.is_dir() else worktree, environment, commit, repository, worktree)

    def lacks(self, file: Path, row: str | None) -> bool:
        """Whether the tree is of a commit that does not have the plan file ``file``, or not that row of it."""
        if self.repository is None or self.commit is None or self.worktree is None:
            return False
        path = self.repository.path_of(file)
        if not self.repository.has(path, self.commit):
            return True
        try:
            rows = load_rows(self.worktree / path)
        except PlanError:
            return False  # which is said where the side is started
        return row not in [one.name if isinstance(one, BrokenRow) else one.matrix_id for one in rows]

    def typed(self, file: Path, row: str | None) -> str:
        """A plan of the working tree as it is typed in the folder. Raises FxbucketError if the commit lacks it."""
        if self.repository is None or self.commit is None or self.worktree is None:
            return typed(file, row)
        path = self.repository.path_of(file)
        self.repository.require(path, self.commit)
        return typed(Path(os.path.relpath(self.worktree / path, self.cwd)), row)

    def cleared(self, text: str) -> str:
        """``text`` with paths as in the repository: without the temporary folder of the worktree."""
        return text.replace(f"{self.worktree}{os.sep}", "") if self.worktree is not None else text

    def refuse_others(self, imported: Sequence[str]) -> None:
        """Raise FxbucketError if something of a commit was read from the working tree: two equal things would be compared.

        ``imported``: files of all modules.
        """
        if self.repository is None:
            return
        top = self.repository.top
        ours = {os.path.realpath(file) for file in imported if _is_below(file, top)}
        wrong = self.repository.tracked(sorted(Path(file).relative_to(top).as_posix() for file in ours))
        if wrong:
            raise FxbucketError(
                f"{wrong[0]} was imported from the working tree: the commit lacks it, or has it in a submodule, or it is "
                "installed in place; put the folder that it is to be imported from on PYTHONPATH"
            )
