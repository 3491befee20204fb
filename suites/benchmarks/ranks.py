"""Prints what ranks cost, 4 of them over gloo, beside torch's MultiProcessTestCase and MultiProcContinuousTest; ``make bench``.

start: from nothing until a first no-op has run on 4 ranks. nothing, all_reduce: the same again on warm ranks, where there are
any. respawn: kill -9 of one rank while nothing runs (with torch's classes: in a test), until a no-op has run on 4 ranks again.
item: a whole pytest item whose body does nothing on 4 ranks, beyond one that does nothing at all. In turns, since machines are
shared and noisy: median (fastest ... slowest).
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pytest_fxbucket.ranks.pool import RankPool
from pytest_fxbucket.ranks.pools import Pools
from suites.benchmarks.main_path import timed

ROOT = Path(__file__).resolve().parents[2]
JOBS = "suites.benchmarks.rank_jobs:"
WORLD = 4
WARM = 100
TURNS = 3
THEIRS = ("MultiProcContinuousTest", "MultiProcessTestCase")
AIMS = {"nothing": "0.008 s", "respawn": "0.3 s"}
ITEMS = 60

CONFTEST = """
import json, time
import pytest

seconds = {}

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    begin = time.perf_counter()
    result = yield
    seconds.setdefault(item.originalname, []).append(time.perf_counter() - begin)
    return result

def pytest_sessionfinish(session):
    with open("seconds.json", "w") as file:
        json.dump(seconds, file)
"""

TESTS = f"""
import pytest

@pytest.mark.parametrize("turn", range({ITEMS}))
def test_plain(turn):
    pass

@pytest.mark.parametrize("turn", range({ITEMS}))
def test_pool(turn, fxbucket_ranks):
    fxbucket_ranks({WORLD}).run("{JOBS}nothing", [None] * {WORLD}, timeout_s=60)

@pytest.mark.fxbucket_ranks({WORLD})
@pytest.mark.parametrize("turn", range({ITEMS}))
def test_body(turn):
    import torch.distributed as dist
    assert dist.get_world_size() == {WORLD}
"""


def main() -> None:
    """Print ours and theirs, a row each, and how many times as long theirs take."""
    print(f"{os.cpu_count()} cores, {WORLD} ranks over gloo; median (fastest ... slowest)")
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("ours", *THEIRS)}
    for turn in range(TURNS):
        _add(found["ours"], ours())
        for name in THEIRS if turn == 0 else ():
            _add(found[name], theirs(name))
    for what in found["ours"]:
        row(f"{what}, ours", found["ours"][what], aim=AIMS.get(what, ""))
        for name in THEIRS:
            row(f"{what}, {name}", found[name][what], beside=found["ours"][what])
    items = item_seconds()
    plain = statistics.median(items["test_plain"])
    for name, what in (("test_pool", "item that runs a job"), ("test_body", "item whose body runs on the ranks")):
        row(f"warm {what}, beyond a plain one", [one - plain for one in items[name][1:]], aim="0.008 s")


def row(what: str, seconds: Sequence[float], *, aim: str = "", beside: Sequence[float] = ()) -> None:
    """Print one figure, with what it should stay under or how many times ours it is."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    more = f", to stay under {aim}" if aim else ""
    more += f", {middle / statistics.median(beside):.0f} times ours" if beside else ""
    print(f"{what:58} {middle:9.4f} s ({low:.4f} ... {high:.4f}){more}", flush=True)


def ours() -> dict[str, list[float]]:
    """Seconds by what, with a server and a pool of their own."""
    found: dict[str, list[float]] = {}
    begin = time.perf_counter()
    pools = Pools()
    try:
        ranks = pools.get(WORLD)
        run(ranks, "nothing")
        found["start"] = [time.perf_counter() - begin]
        for job in ("nothing", "all_reduce"):
            run(ranks, job)
            found[job] = [timed(lambda job=job: run(ranks, job)) for _ in range(WARM)]
        found["respawn"] = [respawn(ranks) for _ in range(5)]
    finally:
        pools.close()
    return found


def run(ranks: RankPool, job: str) -> None:
    """One job on warm ranks."""
    ranks.run(JOBS + job, [None] * WORLD, timeout_s=60, paths=[str(ROOT)])


def respawn(ranks: RankPool) -> float:
    """Seconds from a killed rank's end to the end of the next job."""
    pidfd = os.pidfd_open(ranks.pids[1])
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    begin = time.perf_counter()
    select.select([pidfd], [], [])
    os.close(pidfd)
    run(ranks, "nothing")
    return time.perf_counter() - begin


def theirs(name: str) -> dict[str, list[float]]:
    """Seconds by what, of one of torch's classes."""
    command = [sys.executable, str(Path(__file__).with_name("torch_classes.py")), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return dict(json.loads(done.stdout))


def item_seconds() -> dict[str, list[float]]:
    """Seconds of each pytest item, by its function."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "conftest.py").write_text(CONFTEST)
        Path(folder, "test_items.py").write_text(TESTS)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_items.py"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr}")
        return dict(json.loads(Path(folder, "seconds.json").read_text()))


def _add(to: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    for what, seconds in more.items():
        to[what] += seconds


if __name__ == "__main__":
    main()
