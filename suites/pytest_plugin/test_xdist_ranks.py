"""Many workers, each with ranks of its own, on few cores: slower, and right."""

from __future__ import annotations

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


def test_four_workers_with_four_ranks_each_are_right(pytester):
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess("-n", "4", "-p", "no:cacheprovider").assert_outcomes(passed=9)
