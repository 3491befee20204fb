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
LOOP = "ranks.run('suites.ranks.jobs:announce_and_loop', [sys.argv[1]] * 2, timeout_s=600)"


def start(then, fifo):
    """A parent with a pool of two, in a session of its own; its server's and ranks' pids."""
    command = [sys.executable, "-c", PARENT.format(then=then), str(fifo)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return parent, json.loads(parent.stdout.readline())


ENDS = {
    "kill -9": (LOOP, lambda parent: parent.kill()),
    "ctrl-c": (LOOP, lambda parent: os.killpg(parent.pid, signal.SIGINT)),
    "sigterm": (LOOP, lambda parent: parent.terminate()),
    "exit without close": ("", lambda parent: None),
    "os._exit": ("os._exit(0)", lambda parent: None),
}


@pytest.mark.parametrize("name", ENDS)
def test_nothing_is_left_after(name, watched, tmp_path):
    then, end = ENDS[name]
    os.mkfifo(tmp_path / "fifo")
    announced = os.open(tmp_path / "fifo", os.O_RDWR)
    parent, pids = start(then, tmp_path / "fifo")
    gone = watched(pids)
    if then == LOOP:
        assert os.read(announced, 1) == os.read(announced, 1) == b"x"
    os.close(announced)
    end(parent)
    _, errors = parent.communicate(timeout=20)
    assert gone() == []
    if name == "ctrl-c":
        assert errors.rstrip().endswith("KeyboardInterrupt")


def test_close_ends_server_and_ranks_and_may_be_called_twice(watched):
    pools = Pools()
    ranks = pools.get(2)
    server = ranks.run("suites.ranks.jobs:parent_of", [None] * 2, timeout_s=60)[0]
    gone = watched([server, *ranks.pids])
    pools.close()
    assert gone() == []
    pools.close()
    assert not os.path.exists(f"/proc/{server}")


def test_close_leaves_no_descriptor_open():
    before = set(os.listdir("/proc/self/fd"))
    pools = Pools()
    pools.get(2).run("suites.ranks.jobs:echo", [None] * 2, timeout_s=60)
    pools.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_torch_that_cannot_be_imported_is_said_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = Pools()
    pools.start()
    with pytest.raises(RankError, match=r"the rank server could not start \(ImportError: no torch here\); expected"):
        pools.get(2).run("suites.ranks.jobs:echo", [None] * 2, timeout_s=60)
    pools.close()


def test_a_server_that_crashes_at_start_is_said_with_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os; os.write(2, b'out of luck\\n'); os._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = Pools()
    with pytest.raises(RankError, match=r"the rank server could not start \(out of luck\)"):
        pools.get(2).run("suites.ranks.jobs:echo", [None] * 2, timeout_s=60)
    pools.close()


def test_importing_the_pool_imports_no_torch():
    code = "import sys, pytest_fxbucket.ranks.pools; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def stopped_server():
    """Pools, of which one is warm, and the pid of their server, which stands still."""
    pools = Pools()
    (server, _) = pools.get(2).run("suites.ranks.jobs:parent_of", [None] * 2, timeout_s=60)
    os.kill(server, signal.SIGSTOP)
    yield pools, server
    pools.close()


def test_a_server_that_stands_still_is_an_error_with_its_name_after_a_while_and_the_next_pool_has_a_new_one(
    stopped_server, watched, monkeypatch
):
    pools, server = stopped_server
    gone = watched([server, *pools.get(2).pids])
    said = rf"the rank server \(process {server}\) did not fork 3 ranks within 0.5 s: it is stopped"
    with monkeypatch.context() as patch:
        patch.setattr(launch, "FORK_LIMIT_S", 0.5)
        with pytest.raises(RankError, match=said):
            pools.get(3).start()
    assert gone() == []
    assert pools.get(3).run("suites.ranks.jobs:echo", [1] * 3, timeout_s=60) == [1] * 3


def test_a_job_of_warm_ranks_fails_and_ends_though_the_server_stands_still(stopped_server, watched):
    pools, server = stopped_server
    ranks = pools.get(2)
    gone = watched([server, *ranks.pids])
    with pytest.raises(RankFailure, match="rank 1 of 2 died"):
        ranks.run("suites.ranks.jobs:die_on", [(1, "exit")] * 2, timeout_s=60)
    pools.close()
    assert gone() == []


def test_a_server_that_is_stopped_before_it_is_ready_is_said(monkeypatch):
    monkeypatch.setattr(launch, "START_LIMIT_S", 0.5)
    pools = Pools()
    pools.start()
    server = pools._server._process.pid
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(RankError, match=rf"the rank server \(process {server}\) did not start within 0.5 s: it is stopped"):
        pools.get(2).start()
    pools.close()
