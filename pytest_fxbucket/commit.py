"""The files of a commit beside the working tree: which commit is meant, and a git worktree that holds it for a while."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from types import FrameType

from pytest_fxbucket.errors import FxbucketError, UsageError

_PATIENCE_S = 5.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP unwind the block as SystemExit (130, 143, 129); what comes while it unwinds is ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only there can Python handle signals
        yield
        return
    # A signal that was ignored from the start, as under nohup, stays ignored.
    heeded = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finished(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end, with no input and its output as text.

    When this process is stopped meanwhile, so is that one with all that it started, and nothing of it is left on return.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate()
        except BaseException:
            _stop(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _stop(process: subprocess.Popen[str]) -> None:
    """Tell the whole session first, since git then takes back what it has begun; kill what does not listen."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE_S)  # until all that hold its output are gone
            return


# The git repository of a file: its commits, and what is in them. Reads only, and never from the network.


# Variables that git sets for its hooks: their repository, index and folder need not be those of the plan.
OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_IMPLICIT_WORK_TREE")
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
_OFFLINE = ("-c", "protocol.allow=never")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit as somebody named it."""

    rev: str
    sha: str

    def __str__(self) -> str:
        return self.rev if self.sha.startswith(self.rev) else f"{self.rev} ({self.sha[:7]})"


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository with a working tree."""

    top: Path
    """Top folder of the working tree, without links."""
    environment: Mapping[str, str]
    """What git is run with."""
    asked_by: str = "--at"
    """The option that needs it, for errors."""

    @classmethod
    def of(cls, file: Path, asked_by: str = "--at") -> Repository:
        """The repository that holds ``file``, which need not be there. Raises FxbucketError if there is none, or no git."""
        if shutil.which("git") is None:
            raise FxbucketError(f"{asked_by} needs git, and there is no git on PATH")
        folder = next(folder for folder in Path(os.path.abspath(file)).parents if folder.is_dir())
        ours = {name: value for name, value in os.environ.items() if name not in OF_HOOKS} | _QUIET
        ask = ["git", "rev-parse", "--show-toplevel"]
        answer = finished(ask, folder, ours)
        if answer.returncode != 0 and {"GIT_DIR", "GIT_WORK_TREE"} <= set(os.environ):  # it lies elsewhere than its files
            ours |= {name: os.path.abspath(os.environ[name]) for name in ("GIT_DIR", "GIT_WORK_TREE")}
            answer = finished(ask, folder, ours)
        if answer.returncode != 0:
            said = _reason(answer.stderr)
            why = "" if "not a git repository" in said else f": {said}"
            raise FxbucketError(f"{file} is in no git working tree, so {asked_by} has no commits to look in{why}")
        return cls(Path(answer.stdout.rstrip("\n")).resolve(), ours, asked_by)

    def git(self, *arguments: str) -> str:
        """What git prints. Raises FxbucketError with the line that git says is wrong."""
        done = finished(["git", *_OFFLINE, *arguments], self.top, self.environment)
        if done.returncode != 0:
            raise FxbucketError(f"git {_subcommand(arguments)} failed in {self.top}: {_reason(done.stderr)}")
        return done.stdout

    def commit(self, rev: str) -> Commit:
        """The commit that ``rev`` names. Raises UsageError that names the nearest branch or tag if there is none."""
        if not rev.strip() or rev.startswith("-"):
            raise UsageError(f'{self.asked_by} "{rev}" names no commit; write what git calls one, such as main, HEAD~1 or v1.0')
        try:
            sha = self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}").strip()
        except FxbucketError:
            raise UsageError(f"{self.asked_by} {rev} is no commit of {self.top}{self._hint(rev)}") from None
        return Commit(rev, sha)

    def _hint(self, rev: str) -> str:
        """Which name may be meant instead, or why an ancestor of a commit is not there."""
        names = self.git("for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags", "refs/remotes").split()
        name = re.split(r"[~^@:]", rev)[0]
        near = get_close_matches(name, ["HEAD", *names], n=1)
        if near and near[0] != name:
            return f'; did you mean "{near[0]}"?'
        if self.git("rev-parse", "--is-shallow-repository").strip() == "true":
            return "; this clone is shallow, and git fetch --unshallow gets the rest"
        return f"; {name} is there, but not that far back" if near else ""

    def path_of(self, file: Path) -> PurePosixPath:
        """Path of ``file``, which need not be there, from the top. Raises FxbucketError if it lies elsewhere."""
        whole = Path(os.path.realpath(file.parent)) / file.name
        if not whole.is_relative_to(self.top):
            raise FxbucketError(f"{file} lies outside {self.top}, so no commit there has it")
        return PurePosixPath(whole.relative_to(self.top).as_posix())

    def has(self, path: PurePosixPath, commit: Commit) -> bool:
        """Whether ``commit`` has a file ``path``."""
        return bool(self._names("ls-tree", "-z", "--name-only", commit.sha, "--", str(path)))

    def require(self, path: PurePosixPath, commit: Commit) -> None:
        """Raise FxbucketError if ``commit`` has no file ``path``, and say what it may be called there."""
        if self.has(path, commit):
            return
        raise FxbucketError(f"{path} is not in {commit}{self._renamed(path, commit) or self._near(path, commit)}")

    def tracked(self, files: Sequence[str]) -> list[str]:
        """Those of ``files``, paths from the top, that git knows, in submodules too."""
        if not files:
            return []
        known = set(self._names("ls-files", "-z", "--recurse-submodules"))
        return [file for file in files if file in known]

    def left_out(self, below: PurePosixPath | str) -> set[str]:
        """Paths from the top, ``below`` one or it itself, of what a sparse checkout leaves out: it is as it was."""
        return {line[2:] for line in self._names("ls-files", "-t", "-z", "--", str(below)) if line.startswith("S ")}

    def _near(self, path: PurePosixPath, commit: Commit) -> str:
        """The file there that is nearest: of the same name, else one that is spelled alike."""
        there = [PurePosixPath(name) for name in self._names("ls-tree", "-r", "-z", "--name-only", commit.sha)]
        plans = {str(name.with_suffix("")): name for name in there if name.suffix == path.suffix}
        near = [name for name in plans.values() if name.name == path.name]
        near = near or [plans[stem] for stem in get_close_matches(str(path.with_suffix("")), plans, n=1)]
        return f'; did you mean "{near[0]}"?' if near else ""

    def _renamed(self, path: PurePosixPath, commit: Commit) -> str:
        answer = self._names("diff", "-z", "--name-status", "-M", "--diff-filter=R", commit.sha, "--", f"*{path.suffix}")
        # With -z a rename is three fields: R with its score, the old name, the new one.
        for _, old, new in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
            if new == str(path):
                advice = f": give that as the first plan and {path} as the second" if self.asked_by == "--at" else ""
                return f", where it is called {old}{advice}"
        return ""

    def _names(self, *arguments: str) -> list[str]:
        return [name for name in self.git(*arguments).split("\0") if name]


def _subcommand(arguments: tuple[str, ...]) -> str:
    return next((word for word in arguments if re.fullmatch(r"[a-z][a-z-]+", word)), "")


def _reason(stderr: str) -> str:
    """The line that says what is wrong, without git's word for it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    wrong = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "it said nothing")
    return wrong.removeprefix("fatal:").removeprefix("error:").strip()


# A commit's files in a git worktree of its own, outside the repository, for as long as a block runs.


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
            # Forced twice, since git keeps a worktree locked while it makes it.
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
