"""Marked tests whose ranks are all in one process."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("warm")

TESTS = """
import gc
import pytest
import torch
import torch.distributed as dist

gc.set_threshold(50, 2, 2)  # garbage of failed items is collected while values of the next are packed

@pytest.fixture
def ones():
    return torch.ones(3)

@pytest.mark.parametrize("turn", range(2))
@pytest.mark.fxbucket_ranks(4, backend="local")
def test_sum(turn, ones, fxbucket_rank, fxbucket_mesh, tmp_path):
    tensor = ones * fxbucket_rank
    dist.all_reduce(tensor, group=fxbucket_mesh.get_group())
    assert tensor.tolist() == [6.0] * 3
    assert tmp_path.name == f"rank{fxbucket_rank}"

@pytest.mark.fxbucket_ranks(4, backend="local", timeout_s=600)
def test_deadlock(ones, fxbucket_rank):
    print("said by", fxbucket_rank)
    if fxbucket_rank != 2:
        dist.all_reduce(ones)

@pytest.mark.fxbucket_ranks(256, backend="fake")
def test_many(ones, fxbucket_rank):
    assert (dist.get_rank(), dist.get_world_size()) == (fxbucket_rank, 256)
"""


def test_one_process_plays_all_ranks_and_a_deadlock_is_found_at_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "no rank can go on: rank 2 never launched collective 1 of the job on ranks 0-3; ranks 0-1, 3 launched all_reduce*",
            "*rank 0 *waits for all_reduce(sum) of 3 float32, number 1 on ranks 0-3",
            "*Captured stdout rank 3*",
            "said by 3",
        ]
    )
