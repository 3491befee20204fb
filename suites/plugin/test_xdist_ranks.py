"""Many workers, each with ranks of its own, on few cores: slower, and right."""

from __future__ import annotations

import re

import pytest

TESTS = """
import os
import pytest
import torch
import torch.distributed as dist

@pytest.mark.parametrize("n", range(8))
@pytest.mark.fxbucket_ranks(4)
def test_sum(n, fxbucket_rank):
    tensor = torch.full((3,), float(fxbucket_rank + n))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0 + 4 * n] * 3

@pytest.mark.fxbucket_ranks(4)
def test_threads():
    cores = len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == max(1, cores // 16)
"""
MANY = "\n".join(f"\n[[matrix]]\nid = 'seed{n}'\nrun.seed = {n}" for n in range(1, 3)) + "\n"


def test_four_workers_with_four_ranks_each_are_right(pytester):
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess("-n", "4", "-p", "no:cacheprovider").assert_outcomes(passed=9)


def test_plans_on_four_workers_give_the_verdicts_of_one_and_stay_on_one_worker_each(project: pytest.Pytester):
    for name in ("plain", "good"):
        path = project.path / f"plans/{name}.toml"
        path.write_text(path.read_text().replace("dp_shard = 2", "dp_shard = 4").partition("\n[[matrix]]")[0] + MANY)
    (project.path / "plans/broken.toml").unlink()
    project.makeconftest(
        "def pytest_runtest_logreport(report):\n"
        "    if report.when == 'call' and hasattr(report, 'node'):\n"
        "        print('WORKER', report.nodeid.partition('::')[0], report.node.gateway.id)\n"
    )
    args = ("--fxbucket-plans=plans", "-p", "no:cacheprovider", "-q", "-k", "not golden")
    one = project.runpytest_subprocess(*args)
    four = project.runpytest_subprocess(*args, "-n", "4")
    one.assert_outcomes(passed=30, deselected=6)
    four.assert_outcomes(passed=30)
    workers = set(re.findall(r"WORKER (\S+) (\S+)", four.stdout.str()))
    assert len(workers) == len({plan for plan, _ in workers}) == 2
