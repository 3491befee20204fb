"""Stacks as faulthandler writes them, for people."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

from pytest_fxbucket.ranks.stacks import collect_stacks, folded, process_state, readable

# Of a signal for the whole process any of these threads may be the one that takes it.
STOPS = """
import faulthandler, os, signal, threading
faulthandler.register(signal.SIGUSR1, file=int(os.environ["STACKS"]), all_threads=True)
for _ in range(6):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
stop()
while True:
    pass
"""

RAW = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 5 in wait

Current thread 0x00007f02 (most recent call first):
  File "/home/me/job.py", line 7 in inner
  File "/home/me/job.py", line 3 in job
  File "/site/pytest_fxbucket/ranks/worker.py", line 110 in _run
  File "/site/pytest_fxbucket/ranks/worker.py", line 80 in _one_job
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
IDLE = """Current thread 0x00007f02 (most recent call first):
  File "/site/pytest_fxbucket/ranks/worker.py", line 150 in _receive
  File "/site/pytest_fxbucket/ranks/worker.py", line 80 in _one_job
"""


def test_a_stack_ends_where_the_job_begins_and_has_no_addresses():
    assert readable(RAW).splitlines() == [
        "thread, innermost frame first:",
        '  File "/lib/threading.py", line 5 in wait',
        "thread, innermost frame first:",
        '  File "/home/me/job.py", line 7 in inner',
        '  File "/home/me/job.py", line 3 in job',
    ]


def test_a_rank_between_jobs_says_so():
    assert readable(IDLE).splitlines() == ["thread, innermost frame first:", "  has no job"]


def test_what_is_no_dump_stays_as_it_is():
    assert readable("Fatal Python error: Aborted\n\n" + IDLE).startswith("Fatal Python error: Aborted\nthread")


def test_ranks_that_are_all_through_with_the_job_show_nothing():
    assert list(folded({0: readable(IDLE), 1: readable(IDLE)})) == []
    assert len(list(folded({0: readable(IDLE), 1: "a"}))) == 5


def test_equal_stacks_are_shown_once():
    assert list(folded({0: "a", 1: "b", 2: "a", 3: "a"})) == [
        "--- ranks 0, 2-3, Python stacks",
        "a",
        "--- rank 1, Python stacks",
        "b",
    ]


@contextmanager
def stopped(folder):
    """A process that has stopped itself, as (pid, pidfd, the file for its stacks)."""
    (folder / "stops.py").write_text(STOPS)
    file = os.memfd_create("stacks")
    python = [sys.executable, "-m", "stops"]
    process = subprocess.Popen(python, cwd=folder, env={**os.environ, "STACKS": str(file)}, pass_fds=[file])
    pidfd = os.pidfd_open(process.pid)
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOWAIT)
        yield process.pid, pidfd, file
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        process.wait()
        os.close(pidfd)
        os.close(file)


def test_a_stopped_rank_is_seen_where_it_was_stopped_not_where_it_goes_on(tmp_path):
    for _ in range(16):
        with stopped(tmp_path) as rank:
            (stack,) = collect_stacks([rank])
            assert "in stop\n" in stack


def test_a_rank_that_a_debugger_holds_is_stopped_too():
    held = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", held])  # held by this process
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(process.pid) == "T"
    finally:
        process.kill()
        process.wait()
