"""Runs everything that only a GPU can tell; ``make gpu``.

``python -m suites.gpu.run``: each part that has not run yet with this commit, driver and torch; ``make gpu PART=faults``: one,
again. Writes build/gpu.json after each row, so that a machine that goes takes no result along, and prints one table. Without a
GPU each part is one skip that says why. Ends with 1 if anything failed. Needs no network, no compiler but triton's, and nothing
but what ``make`` installs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from suites.gpu.machine import described, lacking
from suites.gpu.parts import PARTS, Rig
from suites.gpu.rows import ALL, Row, read, table

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], help="run these again; none: each that has not run yet")
    parser.add_argument("--to", type=Path, default=ROOT / "build/gpu.json", help="where the results are kept")
    given = parser.parse_args(arguments)
    results = read(given.to, described())
    for name in given.part or [name for name in PARTS if not results.has_run(name)]:
        rows = list[Row]()
        for row in run_part(name, Rig(), lacking()):
            rows.append(row)
            results.with_part(name, [*rows, Row(name, ALL, "failed", "it did not run to its end", 0.0)]).write(given.to)
        results = results.with_part(name, rows)
        results.write(given.to)
    print(table(results, list(PARTS)), flush=True)
    return int(any(row.outcome == "failed" for rows in results.parts.values() for row in rows))


def run_part(name: str, rig: Rig, why_not: str = "") -> Iterator[Row]:
    """The rows of one part as they come; ``why_not``: what this machine lacks for it. What it raises is a row that failed."""
    if why_not:
        yield Row(name, ALL, "skipped", why_not, 0.0)
        return
    begin = time.monotonic()
    try:
        for what, outcome, said in PARTS[name](rig):
            yield Row(name, what, outcome, said, round(time.monotonic() - begin, 1))
            print(f"{name}: {what}: {outcome}{f': {said}' if said else ''}", flush=True)
            begin = time.monotonic()
    except Exception as error:
        yield Row(name, "what came next", "failed", f"{type(error).__name__}: {error}", time.monotonic() - begin)


if __name__ == "__main__":
    raise SystemExit(main())
