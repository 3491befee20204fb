"""Runs the plans, the drop-in's suites and the pass's tests with several versions of torch; ``make compat``.

``python -m suites.torches.run --folder .compat 2.11 2.15.0``: an environment of its own for each, made where it is not there
yet. A CUDA build of torch takes some 6 GB and runs on a CPU; a CPU build, from an index that has some (PIP_EXTRA_INDEX_URL),
1.4 GB. Prints the table for docs/figures.md, and ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from suites.torches.environment import ROOT, Environment
from suites.torches.parts import PARTS, Told, run

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
