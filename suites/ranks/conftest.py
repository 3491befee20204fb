"""Ranks of the warm pools that all tests have, and who watches processes end."""

from __future__ import annotations

import os
import select

import pytest


@pytest.fixture
def ranks(pools):
    return pools.get(4)


def _wait_gone(pidfds, limit_s=10.0):
    """The pidfds whose processes still live after `limit_s`."""
    left = set(pidfds)
    while left:
        poll = select.poll()
        for fd in left:
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(limit_s * 1000)}
        if not ended:
            break
        left -= ended
    return left


@pytest.fixture
def watched():
    """watched(pids) -> a function that gives the pids of those that do not end."""
    fds = {}

    def watch(pids):
        fds.update({os.pidfd_open(pid): pid for pid in pids})
        return lambda: sorted(fds[fd] for fd in _wait_gone(fds))

    yield watch
    for fd in fds:
        os.close(fd)
