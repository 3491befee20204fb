"""Builds sdist and wheel, checks them, and follows the tutorial with the wheel in a fresh environment; ``make dist``.

Both land in ``dist/``; their version is the last tag's. Exit code 1, with the sentence, for what does not hold.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from suites.docs import tutorial

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
TOOLS = ("build>=1.3", "check-wheel-contents>=0.6", "twine>=6")


def main() -> int:
    """Build, check, try; the last line names what is in ``dist/``."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="fxbucket-dist-") as scratch:
        tools = _environment(Path(scratch) / "tools", *TOOLS)
        _call(tools / "python", "-m", "build", "--outdir", DIST, ROOT)  # the wheel of the sdist
        (wheel,) = DIST.glob("*.whl")
        _call(tools / "twine", "check", "--strict", *sorted(DIST.iterdir()))
        _call(tools / "check-wheel-contents", wheel)
        fresh = _environment(Path(scratch) / "fresh", "--constraint", ROOT / "constraints.txt", wheel)
        folder = Path(scratch) / "empty"
        folder.mkdir()
        follow_tutorial(folder, fresh)
    print(f"dist/ has {', '.join(sorted(path.name for path in DIST.iterdir()))}; the tutorial goes as it says")
    return 0


def follow_tutorial(folder: Path, commands: Path) -> None:
    """Follow the tutorial in the empty ``folder`` with what is in ``commands`` alone: no other environment's settings."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
    variables |= {"COLUMNS": "80", "PATH": os.pathsep.join([str(commands), os.environ["PATH"]])}

    def run(program: str, words: list[str]) -> str:
        ran = subprocess.run(
            [str(commands / program), *words], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        return ran.stdout + ran.stderr

    tutorial.follow(folder, run)


def _environment(folder: Path, *wanted: str | Path) -> Path:
    """Make a virtual environment with what is ``wanted`` of pip; gives its folder of commands."""
    venv.create(folder, with_pip=True)
    _call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", *wanted)
    return folder / "bin"


def _call(*words: str | Path) -> None:
    print("$", *(Path(words[0]).name, *words[1:]), flush=True)
    if status := subprocess.run([str(word) for word in words], check=False).returncode:
        raise SystemExit(f"{Path(words[0]).name} ended with {status}")


if __name__ == "__main__":
    sys.exit(main())
