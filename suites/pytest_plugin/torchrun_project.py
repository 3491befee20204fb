"""What torchrun's processes run in test_torchrun.py: files by name."""

from __future__ import annotations

from suites.pytest_plugin.conftest import MODEL, PLAN

GOOD = PLAN.replace("dp_shard = 2", "dp_shard = 4")
BITWISE_ALONE = "\n[checks]\naudit = false\ngolden = false\ncollectives = false\n"
LOUD = """
from tiny import batch as tiny_batch, build, loss

def batch(rank, step):
    print(f"batch of rank {rank}")
    if rank == 3 and step == 2:  # tracing asks for earlier ones only
        raise ValueError("no data on rank 3")
    return tiny_batch(rank, step)
"""

JOBS = """
import os, signal, time
import torch, torch.distributed as dist

def total(rank, world, payload):
    value = torch.tensor([payload])
    dist.all_reduce(value)
    return int(value), os.getpid()

def dies(rank, world, payload):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(rank, world, payload)

def raises(rank, world, payload):
    if rank == 2:
        raise ValueError("at once")
    return total(rank, world, payload)

def owns(rank, world, payload):
    from pathlib import Path
    return Path("here") if rank == 1 else None

def kills(rank, world, pid):
    if rank == world - 1:
        os.kill(pid, signal.SIGKILL)  # of the process that sent this
        signal.pause()
    return total(rank, world, 1)

def hangs(rank, world, payload):
    if rank == 1:
        while True:
            time.sleep(1)
    return total(rank, world, payload)
"""

HEAD = """
import logging
import os
import pytest

RANK = int(os.environ["RANK"])

def totals(ranks, world=4, job="jobs:total", timeout_s=120):
    return [value for value, _ in ranks(world).run(job, [1] * world, timeout_s=timeout_s, paths=["."])]
"""

ITEMS = (
    HEAD
    + """
def test_sum(fxbucket_ranks):
    assert totals(fxbucket_ranks) == [4] * 4

@pytest.mark.fxbucket_ranks(4, timeout_s=120)
def test_body(fxbucket_rank, tmp_path):
    assert tmp_path.name == f"rank{fxbucket_rank}"
    assert fxbucket_rank != 3

def test_one_never_comes(fxbucket_ranks):
    if RANK == 3:
        raise ValueError("before anything")
    totals(fxbucket_ranks)

def test_rank_0_never_comes(fxbucket_ranks):
    if RANK:
        totals(fxbucket_ranks)

def test_killed_child(fxbucket_ranks):
    totals(fxbucket_ranks, job="jobs:dies")

def test_no_plain_data(fxbucket_ranks):
    totals(fxbucket_ranks, job="jobs:owns")

def test_raising_child(fxbucket_ranks):
    totals(fxbucket_ranks, job="jobs:raises", timeout_s=10_000)  # nobody waits for that

def test_hanging_child(fxbucket_ranks):
    totals(fxbucket_ranks, job="jobs:hangs", timeout_s=2)

def test_two_of_four(fxbucket_ranks):
    assert totals(fxbucket_ranks, world=2) == [2, 2]

def test_eight_of_four(fxbucket_ranks):
    totals(fxbucket_ranks, world=8)

def test_other_jobs(fxbucket_ranks):
    totals(fxbucket_ranks, job="jobs:hangs" if RANK == 1 else "jobs:total")

def test_skipped_by_one():
    if RANK == 1:
        pytest.skip("here only")

@pytest.fixture
def broken():
    if RANK == 2:
        raise OSError("no such device")

def test_set_up(broken):
    pass

def test_only_rank_0_writes(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("fxbucket-controller") == (RANK == 0)
    assert pytestconfig.pluginmanager.hasplugin("lfplugin") == (RANK == 0)

def test_last(fxbucket_ranks):
    logging.getLogger("theirs").warning("of rank %d", RANK)
    assert totals(fxbucket_ranks) == [4] * 4
"""
)

TWO_TEXTS = (
    HEAD
    + """
@pytest.mark.parametrize("text", ["one", "other"])
def test_two_texts(text, fxbucket_expect):
    fxbucket_expect(text, "")
"""
)

KILLED = (
    HEAD
    + """
def test_first(fxbucket_ranks):
    totals(fxbucket_ranks, world=2)

def test_gone(fxbucket_ranks):
    fxbucket_ranks(2).run("jobs:kills", [os.getpid()] * 2, timeout_s=120, paths=["."])

def test_never_begun():
    pass
"""
)

ORDERS = """
import os

if os.environ.get("ORDER") == "own":
    def pytest_collection_modifyitems(items):
        if os.environ["RANK"] != "0":
            items.reverse()

if os.environ.get("ORDER") == "lacking" and os.environ["GROUP_RANK"] == os.environ["LACKING_NODE"]:
    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if item.name != "test_gone"]
"""

FILES = {
    "tiny.py": MODEL,
    "loud.py": LOUD,
    "jobs.py": JOBS,
    "conftest.py": ORDERS,
    "test_items.py": ITEMS,
    "test_killed.py": KILLED,
    "test_two_texts.py": TWO_TEXTS,
    "pytest.ini": "[pytest]\n",
    "plans/good.toml": GOOD,
    "plans/loud.toml": GOOD.replace("tiny:", "loud:") + BITWISE_ALONE,
}
