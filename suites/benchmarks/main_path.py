"""Prints what the main path costs: start-up with and without the plugin, a plan from cold, a plan on a warm pool, 32 layers.

Whole commands in processes of their own, as a user runs them; ``make bench``. Machines are shared and noisy: each figure is the
median of a few runs, with the fastest and slowest beside it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "fixtures/plans"
ITEMS = ("audit", "golden", "collectives", "bitwise")


def main() -> None:
    """Print one row a figure."""
    print(f"{os.cpu_count()} cores; median (fastest ... slowest)")
    start_up(20)
    row(
        "4 layers, 4 checks, 4 ranks, from cold",
        "15 s",
        [timed(lambda: run_plan("llama.toml", base_only=True)) for _ in range(3)],
    )
    warm = [second_plan() for _ in range(3)]
    row("a second plan on the warm pool", "3 s", [sum(one[name] for name in ITEMS) for one in warm])
    row("eager of a warm plan, beside its bitwise", "1 x", [one["eager"] / one["bitwise"] for one in warm], "x")
    row("32 layers, 256-rank mesh, bitwise on 4", "60 s", [timed(lambda: run_plan("llama32.toml")) for _ in range(2)])
    report_memory()


def row(what: str, aim: str, measured: Sequence[float], unit: str = "s") -> None:
    """Print one figure beside what it should stay under."""
    low, middle, high = min(measured), statistics.median(measured), max(measured)
    print(f"{what:45} {middle:8.3f} {unit} ({low:.3f} ... {high:.3f}), to stay under {aim}", flush=True)


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of ``work``."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def pytest(*args: str, cwd: Path = ROOT) -> str:
    """Output of a pytest run that must pass."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", "-q", *args]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_plan(plan: str, *more: str, base_only: bool = False) -> str:
    """Run a fixture plan, all of it or without its matrix rows."""
    path = f"fixtures/plans/{plan}"
    names = ITEMS if base_only else ()
    nodes = [f"{path}::{name}" for name in names] or [path]
    deselected = [f"--deselect={path}::{name}[" for name in names]
    return pytest(*nodes, *deselected, *more)


def start_up(times: int) -> None:
    """pytest in an empty folder, with and without the plugin in turn: the difference of the medians."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder)
        pairs = [
            (
                timed(lambda: pytest("--collect-only", cwd=empty)),
                timed(lambda: pytest("--collect-only", "-p", "no:fxbucket", cwd=empty)),
            )
            for _ in range(times + 1)
        ][1:]
    row("pytest start-up without a plan, added", "0.020 s", [with_plugin - without for with_plugin, without in pairs])


def second_plan() -> dict[str, float]:
    """Seconds of each item of a plan that runs behind another one, on its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        first = [f"fixtures/plans/llama.toml::{name}" for name in (*ITEMS, "eager")]
        second = [f"fixtures/plans/llama_tied.toml::{name}" for name in (*ITEMS, "eager")]
        pytest(*first, *second, *(f"--deselect={name}[" for name in first), f"--junitxml={junit}")
        cases = ElementTree.parse(junit).getroot().iter("testcase")
        return {
            case.get("name", ""): float(case.get("time", 0))
            for case in cases
            if "llama_tied" in case.get("classname", "") + case.get("file", "")
        }


def report_memory() -> None:
    """Largest rank of each plan, as its bitwise verdict says."""
    for plan in ("llama.toml", "llama32.toml", "hf_llama.toml"):
        with tempfile.TemporaryDirectory() as folder:
            junit = Path(folder) / "junit.xml"
            run_plan(plan, f"--junitxml={junit}")
            sizes = [int(mib) for mib in re.findall(r"largest rank (\d+) MiB", junit.read_text())]
        print(f"{'largest rank of ' + plan:45} {max(sizes):8} MiB, to stay under 1024 MiB", flush=True)


if __name__ == "__main__":
    main()
