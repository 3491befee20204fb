"""However the parent ends, no process of its pools is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import launch
from pytest_fxbucket.ranks.pool import RankFailure
from pytest_fxbucket.ranks.pools import Pools
from suites.pytest_plugin.processes import Trace

PARENT = """
import json, os, signal, sys
from pytest_fxbucket.ranks.pools import Pools
pools = Pools()
ranks = pools.get(2)
pids = [*ranks.run("suites.ranks.jobs:place", [None] * 2, timeout_s=60)]
server = ranks.run("suites.ranks.jobs:parent_of", [None] * 2, timeout_s=60)[0]
print(json.dumps([server, *(row[5] for row in pids)]), flush=True)
{then}
"""
# Waits until it is told to: pids of processes that have ended cannot be watched.
EXIT = "sys.stdin.readline()"
LOOP = "ranks.run('suites.ranks.jobs:announce_and_loop', [sys.argv[1]] * 2, timeout_s=600)"


def start(then, fifo):
    """A parent with a pool of two, in a session of its own; its server's and ranks' pids."""
    command = [sys.executable, "-c", PARENT.format(then=then), str(fifo)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    parent = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    return parent, json.loads(parent.stdout.readline())


# Ctrl-C is tried where pytest is the parent: suites/pytest_plugin/test_faults_items.py.
@pytest.mark.parametrize("then", [EXIT, LOOP], ids=["exit without close", "kill -9"])
def test_nothing_is_left_after(then, watched, tmp_path, monkeypatch):
    trace = Trace(monkeypatch, tmp_path)
    os.mkfifo(tmp_path / "fifo")
    announced = os.open(tmp_path / "fifo", os.O_RDWR)
    parent, pids = start(then, tmp_path / "fifo")
    gone = watched(pids)
    if then == LOOP:
        assert os.read(announced, 1) == os.read(announced, 1) == b"x"
        parent.kill()
    os.close(announced)
    parent.communicate("\n", timeout=20)
    assert gone() == []
    assert trace.left(pids) == []


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('no torch here')", "ImportError: no torch here; expected a torch that can be imported$"),
        ("import os; os.write(2, b'out of luck\\n'); os._exit(9)", "out of luck$"),
    ],
)
def test_a_server_that_cannot_start_is_said_in_one_sentence_with_its_last_words(tmp_path, monkeypatch, torch, said):
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = Pools()
    with pytest.raises(RankError, match=rf"the rank server could not start: {said}"):
        pools.get(2).run("suites.ranks.jobs:echo", [None] * 2, timeout_s=60)
    pools.close()


def test_importing_the_pool_imports_no_torch():
    code = "import sys, pytest_fxbucket.ranks.pools; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_server_that_stands_still_holds_up_no_warm_ranks_and_is_an_error_with_its_name_when_it_must_fork(
    watched, monkeypatch
):
    """Then it is ended, with its ranks."""
    pools = Pools()
    ranks = pools.get(2)
    (server, _) = ranks.run("suites.ranks.jobs:parent_of", [None] * 2, timeout_s=60)
    os.kill(server, signal.SIGSTOP)
    gone = watched([server, *ranks.pids])
    with pytest.raises(RankFailure, match="rank 1 of 2 died"):
        ranks.run("suites.ranks.jobs:die_on", [(1, "exit")] * 2, timeout_s=60)
    said = rf"the rank server \(process {server}\) did not fork 3 ranks within 0.5 s: it is stopped"
    with monkeypatch.context() as patch:
        patch.setattr(launch, "FORK_LIMIT_S", 0.5)
        with pytest.raises(RankError, match=said):
            pools.get(3).start()
    assert gone() == []
    pools.close()


def test_a_server_that_is_stopped_before_it_is_ready_is_said(monkeypatch):
    monkeypatch.setattr(launch, "START_LIMIT_S", 0.5)
    pools = Pools()
    pools.start()
    server = pools._server._process.pid
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(RankError, match=rf"the rank server \(process {server}\) did not start within 0.5 s: it is stopped"):
        pools.get(2).start()
    pools.close()
