"""Runs the plans, the drop-in's suites, those of trainers and the pass's tests with several versions of torch; ``make compat``.

``python -m suites.torches.run --folder .compat 2.11 2.15.0``: an environment of its own for each, made where it is not there
yet. A CUDA build of torch takes some 6 GB and runs on a CPU; a CPU build, from an index that has some (PIP_EXTRA_INDEX_URL),
1.4 GB. Prints the table for docs/figures.md, and ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "dev,models,xdist"
_PINS = ROOT / "constraints.txt"
_ABOUT = "import json, platform, torch; print(torch.__version__, platform.python_version())"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with torch ``version`` (``2.15``: the last of its patches; ``2.15.0``: that one) in ``folder``."""

    version: str
    folder: Path
    made_with: str = sys.executable
    """The Python that it is of."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Install what is not there yet. Raises CalledProcessError where pip cannot."""
        wanted = f"{self._torch}\n{EXTRAS}\n{_without_torch()}{(ROOT / 'pyproject.toml').read_text()}"
        done = self.folder / "made-from.txt"
        if done.exists() and done.read_text() == wanted:
            return
        pins = self.folder / "constraints.txt"
        if not self.python.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            subprocess.run([self.made_with, "-m", "venv", self.folder], check=True)
        pins.write_text(_without_torch())
        # Without pip's cache: each torch is some gigabytes, and is installed once.
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", pins]
        subprocess.run([*pip, self._torch, "--editable", f"{ROOT}[{EXTRAS}]"], check=True)
        done.write_text(wanted)

    def versions(self) -> tuple[str, str]:
        """Of torch (``2.13.0+cpu``) and of Python that are in it."""
        told = subprocess.run([self.python, "-c", _ABOUT], check=True, capture_output=True, text=True).stdout.split()
        return told[0], told[1]

    def variables(self) -> Mapping[str, str]:
        """What its processes run with: the source of this folder, whoever made the environment; commands of its own first."""
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}

    @property
    def _torch(self) -> str:
        return f"torch=={self.version}" + ("" if self.version.count(".") > 1 else ".*")


def _without_torch() -> str:
    return "".join(line for line in _PINS.read_text().splitlines(keepends=True) if not line.startswith("torch=="))


# What is run with each torch, and what pytest said of it.


_BESIDE = ("suites/passes/test_dropin.py", "suites/passes/test_beside_torch.py")
PARTS: Mapping[str, tuple[str, ...]] = {
    "plans": ("--fxbucket-plans=fixtures/plans",),
    "drop-in": ("suites/compiled", *_BESIDE),
    "trainers": ("suites/train_step", "suites/capture"),
    "pass": (
        "suites/passes",
        "suites/golden",
        "suites/ranks/test_local.py",
        "suites/eager",
        "suites/same",
        *(f"--ignore={path}" for path in _BESIDE),
    ),
}
"""Arguments of pytest by the column that they fill: goldens are checked with the plans, and read and written by the pass's."""
_ENDED = (0, 1)
"""Exit codes of pytest's that mean that all was run: no failure, some."""


@dataclass
class Told:
    """Outcome of one part."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """Names of what failed, was an error, or is expected to fail and passed."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests by reason."""

    @property
    def cell(self) -> str:
        """For the table."""
        return f"{self.passed:,} of {self.passed + len(self.failed):,}"


def run(environment: Environment, part: str, folder: Path) -> Told:
    """Run one of :data:`PARTS`, with its output and report in ``folder``. Raises RuntimeError where pytest itself failed."""
    report, log = folder / f"{part}.xml", folder / f"{part}.log"
    report.unlink(missing_ok=True)
    command = [environment.python, "-m", "pytest", *PARTS[part], "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment.variables(), stdout=output, stderr=subprocess.STDOUT)
    if done.returncode not in _ENDED or not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}; see {log}")
    return told_by(report)


def told_by(report: Path) -> Told:
    """What a junit report says."""
    told = Told()
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            told.failed.append(name)
        elif skipped is not None:
            told.skipped[skipped.get("message", "no reason given")] += 1
        else:
            told.passed += 1
    return told


HEAD = "\n".join(
    [
        f"| torch | Python | {' | '.join(PARTS)} | skipped, and why |",
        f"|---|---|{'---|' * len(PARTS)}---|",
    ]
)


def main() -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".compat", help="where the environments are")
    parser.add_argument("--python", default=sys.executable, help="what they are made with")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part of it")
    parser.add_argument("--make-only", action="store_true", help="make the environments, and run nothing")
    parser.add_argument("versions", nargs="+", help="of torch: 2.15, or 2.15.0")
    given = parser.parse_args()
    rows, failed = list[str](), False
    for version in given.versions:
        environment = Environment(version, given.folder.resolve() / version, given.python)
        try:
            environment.make()
            told = {} if given.make_only else run_all(environment, given.only or list(PARTS))
        except (RuntimeError, subprocess.CalledProcessError) as error:
            failed = True
            print(f"torch {version}: {error}", file=sys.stderr, flush=True)
            continue
        for name in (name for one in told.values() for name in one.failed):
            failed = True
            print(f"torch {version} FAILED {name}", flush=True)
        rows += [row(*environment.versions(), told)] if told else []
    print("\n".join([HEAD, *rows]) if rows else "no table: nothing was run", flush=True)
    return int(failed)


def run_all(environment: Environment, parts: list[str]) -> dict[str, Told]:
    """Run ``parts`` one after another."""
    found = {}
    for part in parts:
        begin = time.monotonic()
        found[part] = run(environment, part, environment.folder)
        seconds = time.monotonic() - begin
        print(f"torch {environment.version}, {part}: {found[part].cell} in {seconds:.0f} s", flush=True)
    return found


def row(torch: str, python: str, told: dict[str, Told]) -> str:
    """One line of the table."""
    skipped = sum((one.skipped for one in told.values()), Counter[str]())
    cells = [told[part].cell if part in told else "" for part in PARTS]
    why = "; ".join(f"{count}: {reason}" for reason, count in skipped.items()) or "none"
    return f"| {torch} | {python} | {' | '.join(cells)} | {why} |"


if __name__ == "__main__":
    sys.exit(main())
