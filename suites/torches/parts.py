"""What is run with each torch, and what pytest said of it."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from suites.torches.environment import ROOT, Environment

_BESIDE = ("suites/passes/test_dropin.py", "suites/passes/test_beside_torch.py")
PARTS: Mapping[str, tuple[str, ...]] = {
    "plans": ("--fxbucket-plans=fixtures/plans",),
    "drop-in": ("suites/compiled", *_BESIDE),
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
