"""Ranks that are timed come first on the machine where that is allowed, and go on as they are where it is not."""

from __future__ import annotations

import os

import pytest

from pytest_fxbucket.bench.job import come_first

JOB = "suites.bench.timing_jobs:priorities"


def priorities(pools, is_allowed):
    """In ranks of their own: who came first stays first, and who became nobody stays nobody."""
    pool = pools.get(2, "gloo:plain")
    pool.close()
    try:
        return pool.run(JOB, [is_allowed] * 2, timeout_s=60)
    finally:
        pool.close()


def is_allowed() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if come_first() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_communication_comes_before_compute(pools):
    if not is_allowed():
        pytest.skip("this user may not have real-time priority: neither CAP_SYS_NICE nor ulimit -r")
    for answer, main, others in priorities(pools, True):
        assert answer is True
        assert main == (os.SCHED_RR, 1)
        assert others == [(os.SCHED_RR, 2)]


def test_where_it_is_not_allowed_nothing_happens(pools):
    if os.getuid() != 0:
        pytest.skip("only root can become nobody")
    for answer, main, others in priorities(pools, False):
        assert answer is False
        assert main == (os.SCHED_OTHER, 0)
        assert others == [(os.SCHED_OTHER, 0)]
