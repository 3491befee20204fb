"""A warm run is told what a new Python is told, ends as one does, and hides nothing that it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from suites.warm.runs import WarmRuns

ASKS = """
import atexit, json, os, sys
atexit.register(print, "at exit")
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], sys.path[0], __name__, sys.stdin.read()]))
sys.exit({status})
"""
LEAVES = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True).pid)
"""

ON_WORKERS = """
import os, sys
import pytest

WAS_WARM = "torch" in sys.modules

@pytest.mark.parametrize("number", [0, 1])
def test_worker(number, worker_id):
    with open(f"{worker_id}.txt", "w") as file:
        print(WAS_WARM, os.getppid(), os.environ["GIVEN"], sys.argv[0], file=file)
"""


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("status", [0, 3, "'why'"])
def test_it_is_told_and_says_what_a_new_process_does(warm_runs: WarmRuns, tmp_path: Path, status: object) -> None:
    words = [write(tmp_path, ASKS.format(status=status)), "--flag"]
    environ = {**os.environ, "GIVEN": "this"}
    warm = warm_runs.run(words, tmp_path, environ)
    new = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, stdin=-3)
    assert json.loads(warm.stdout.splitlines()[0])[2] == "this"
    assert (warm.returncode, warm.stdout, warm.stderr) == (new.returncode, new.stdout, new.stderr)


def test_workers_of_a_run_are_warm_too(warm_runs: WarmRuns, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    (tmp_path / "test_on_workers.py").write_text(ON_WORKERS)
    with (tmp_path / "out").open("w") as out:
        environ = {**os.environ, "GIVEN": "this"}
        run = warm_runs.start(["-m", "pytest", "-n2", "-p", "no:fxbucket"], tmp_path, environ, out, out)
        assert run.wait() == 0, (tmp_path / "out").read_text()
    said = [(tmp_path / f"{worker}.txt").read_text() for worker in ("gw0", "gw1")]
    assert said == [f"True {run.pid} this -c\n"] * 2


def test_what_it_leaves_behind_is_seen(warm_runs: WarmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_runs.left() == []
    pid = int(warm_runs.run([write(tmp_path, LEAVES)], tmp_path, os.environ).stdout)
    with monkeypatch.context() as patch:
        patch.setattr("suites.warm.runs.ends", lambda one: one != pid)  # nobody waits for it
        assert warm_runs.left() == [pid]
    os.kill(pid, signal.SIGKILL)
    assert warm_runs.left() == []


def test_one_that_takes_too_long_can_be_killed(warm_runs: WarmRuns, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        run = warm_runs.start([write(tmp_path, "import signal\nsignal.pause()\n")], tmp_path, os.environ, out, out)
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(0)
        run.kill()
        assert run.wait() == -signal.SIGKILL
