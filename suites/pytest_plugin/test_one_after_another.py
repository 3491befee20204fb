"""Whatever a green test does to its ranks, the verdict of the next is the next one's own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("warm")

TESTS = """
import os
import signal
import sys
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.fxbucket_ranks(2)

def test_forks():
    twin = os.fork()
    if twin:
        os.waitpid(twin, 0)  # what it says is said before the rank returns

def test_fails_after_it(fxbucket_rank):
    assert fxbucket_rank < 0

def test_twin_fails():
    assert os.fork() != 0

def test_cleans_up():
    dist.destroy_process_group()

def test_reduces_after_it(fxbucket_rank):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2

def test_closes():
    os.closerange(0, 3)

def test_prints_after_it():
    print("heard")
    assert False

def test_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    sys.setrecursionlimit(100_000)
    sys.stdout = None

def test_stays_after_it():
    assert signal.sigtimedwait({signal.SIGALRM}, 0.2) is None
    assert sys.getrecursionlimit() < 100_000
    print("heard again")

def test_long_reason():
    pytest.skip("because " * 1_000_000)
"""


def test_each_test_has_its_own_verdict_after_one_that_left_its_ranks_changed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", "-rA")
    green = ("forks", "twin_fails", "cleans_up", "reduces_after_it", "closes", "alarm", "stays_after_it")
    red = ("fails_after_it", "prints_after_it")
    verdicts = {f"test_{name} PASSED" for name in green} | {f"test_{name} FAILED" for name in red}
    said = {" ".join(line.partition("::")[2].split()[:2]) for line in result.outlines if "[" in line}
    assert verdicts <= said
    result.assert_outcomes(passed=len(green), failed=len(red), skipped=1)
    text = result.stdout.str()
    assert "heard again" in text
    assert "which the job forked, came out of it beside rank 0" in text
    assert len(text) < 1 << 20
