"""A real git repository in a temporary folder, and what tests ask of it before and after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from suites.plans.traced import TRACED

ROOT = Path(__file__).parents[2]
PLAN = TRACED
OTHER_PLAN = PLAN.replace('["layers.[0-2]"]', '["layers.0", "layers.1+layers.2"]')
STUB = """
import os, sys
from pathlib import Path
assert sys.argv[1] == "show"
"""
"""Begin of a ``pytest_fxbucket`` that a repository holds: quick, for what needs no graph."""
SHOWN = "sys.stdout.write(Path('shown.txt').read_text())"
"""The rest of one that shows what the commit has in a file."""
BODY = "mesh dp_shard=4\n\ngraph joint\n\nforward\n  launch  all_gather layers.0\n"


class SmallRepository:
    """Files, commits and state of one repository, whose plan is ``plan.toml``."""

    def __init__(self, top: Path) -> None:
        self.top = top
        top.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")
        with (top / ".git" / "config").open("a") as config:  # quicker than a git for each
            config.write(f"[user]\n\temail = a@b.c\n\tname = a\n[core]\n\thooksPath = {top / '.git' / 'hooks'}\n")
        self.write("pytest.ini", "[pytest]\n")
        self.write(".gitignore", "__pycache__\n.fxbucket\n")

    def git(self, *words: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(["git", *words], cwd=self.top, env=clean, check=True, capture_output=True, text=True).stdout

    def write(self, name: str, text: str) -> Path:
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            self.write(name.replace("__", "/") + ".toml", text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "--no-verify", "-m", "a commit")
        return self.git("rev-parse", "HEAD").strip()

    def stub(self, show: str) -> None:
        """A package pytest_fxbucket of the repository's own, whose ``show`` is the given code."""
        self.write("pytest_fxbucket/__init__.py", "")
        self.write("pytest_fxbucket/cli/__init__.py", "")
        self.write("pytest_fxbucket/cli/__main__.py", STUB + show)

    def state(self) -> tuple[str, ...]:
        """All that ``--at`` must leave as it is."""
        index = (self.top / self.git("rev-parse", "--git-path", "index").strip()).read_bytes()
        asked = ("status --porcelain", "worktree list --porcelain", "for-each-ref", "stash list", "config --list --local")
        return (
            index.hex(),
            (self.top / ".git").read_text() if (self.top / ".git").is_file() else "",
            *(self.git(*a.split()) for a in asked),
        )


def command(*words: str) -> list[str]:
    """``fxbucket`` as a process of its own."""
    return [sys.executable, "-m", "pytest_fxbucket.cli", *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **more}
