"""A rank that goes wrong is one failed item that tells all, and the next item is well; however pytest ends, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from suites.pytest_plugin.processes import Trace, ends
from suites.ranks.fault_jobs import FAULTS

ROOT = str(Path(__file__).resolve().parents[2])
WORLD = 4

# A batch is made on each rank before each step; the harness makes those of step 0 in its own process too, to trace.
BATCHES = """
import os, signal
from tiny import batch as sound, build, loss

def wrong(rank, step, act):
    if (rank, step) == (2, 1):
        act()
    return sound(rank, step)

def refuse():
    raise ValueError("no batch today")

def announce():
    with open(os.environ["FIFO"], "wb", buffering=0) as file:
        file.write(b"x")
    signal.pause()

def raises(rank, step): return wrong(rank, step, refuse)
def killed(rank, step): return wrong(rank, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
def stops(rank, step): return wrong(rank, step, lambda: os.kill(os.getpid(), signal.SIGSTOP))
def waits(rank, step): return wrong(rank, step, announce)
"""
SAID = {
    "killed": 'rank 2 of 4 was killed by SIGKILL, at "bucketed step 1 of 3" (bitwise of plans/killed.toml)',
    "raises": 'rank 2 of 4 raised ValueError: no batch today, at "bucketed step 1 of 3" (bitwise of plans/raises.toml)',
    "stops": '4 of 4 ranks did not answer within 5 s; rank 2: is stopped, at "bucketed step 1 of 3"; *',
}

# One that raises, dies and hangs: suites/ranks/test_faults.py has all faults.
SOME = ("raise_before", "crash", "hold_the_lock")

USERS = f"""
import pytest
from suites.ranks.fault_jobs import FAULTS

FAULTS = [fault for fault in FAULTS if fault.job in {SOME}]
PLACE = dict(paths=[{ROOT!r}])

TURNS = [pytest.param(i, turn, id=f"{{f.job}}-{{turn}}") for i, f in enumerate(FAULTS) for turn in ("wrong", "well")]

@pytest.mark.parametrize(("number", "turn"), TURNS)
def test_ranks(fxbucket_ranks, number, turn):
    ranks, fault = fxbucket_ranks({WORLD}), FAULTS[number]
    if turn == "wrong":
        ranks.start()
        job, culprit = "suites.ranks.fault_jobs:" + fault.job, number % {WORLD}
        ranks.run(job, [culprit] * {WORLD}, timeout_s=1.5 if fault.is_late else 60, **PLACE)
    else:
        results = ranks.run("suites.ranks.fault_jobs:healthy", [None] * {WORLD}, timeout_s=60, **PLACE)
        assert results == [[{WORLD}.0] * 3] * {WORLD}
"""


@pytest.fixture
def trace(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return Trace(monkeypatch, tmp_path)


@pytest.fixture
def plans(project):
    """A plan for each way to go wrong, and plain.toml."""
    Path("wrong.py").write_text(BATCHES)
    plain = (
        Path("plans/plain.toml")
        .read_text()
        .replace("dp_shard = 2", f"dp_shard = {WORLD}")
        .replace("timeout_s = 30", "timeout_s = 60")
    )
    Path("plans/plain.toml").write_text(plain)
    for name in (*SAID, "waits"):
        text = plain.replace("tiny:batch", f"wrong:{name}")
        Path(f"plans/{name}.toml").write_text(text.replace("timeout_s = 60", "timeout_s = 5") if name == "stops" else text)
    return project


@pytest.mark.usefixtures("warm")
def test_a_rank_that_goes_wrong_in_a_plan_is_one_failed_item_and_the_next_is_well(plans, trace, warm_runs):
    result = plans.runpytest_subprocess(*(f"plans/{name}.toml::bitwise" for name in (*SAID, "plain")), "-v")
    result.assert_outcomes(failed=len(SAID), passed=1)
    text = result.stdout.str()
    assert re.search(r"^plans/plain\.toml::bitwise PASSED", text, re.M)
    for name, said in SAID.items():
        result.stdout.fnmatch_lines([said])
        told = text.partition(f" plans/{name}.toml: bitwise __")[2].partition("\n____")[0].splitlines()
        table = told[told.index("--- the ranks") + 1 :][:WORLD]
        assert [row.split("  ")[0] for row in table] == ["rank 2", "rank 0", "rank 1", "rank 3"]
        assert all(
            re.search(r'"unbucketed step 2 of 3"  waits for all_gather of .*, number 1 on ranks 0-3 \(bucket ', row)
            for row in table[1:]
        )
        assert any(line.startswith("try: ") for line in told)
    assert trace.left(warm_runs.left()) == []
    self_only(Path(".fxbucket"))


def self_only(root: Path) -> None:
    """No other user reads what was left to look at: its root is closed, and each log for itself."""
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    logs = list(root.rglob("*.log"))
    assert len(logs) == len(SAID) * WORLD
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}


@pytest.mark.usefixtures("warm")
def test_a_fault_in_a_users_test_is_one_failed_item_and_the_next_is_well(pytester, trace, warm_runs):
    pytester.makepyfile(test_users=USERS)
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(failed=len(SOME), passed=len(SOME))
    text = result.stdout.str()
    faults = [fault for fault in FAULTS if fault.job in SOME]
    for number, fault in enumerate(faults):
        names = f"{fault.job}-wrong", f"{fault.job}-well"
        assert re.search(rf"{names[0]}\] FAILED.*\n.*{names[1]}\] PASSED", text)
        told = re.search(rf"^_+ test_ranks\[{names[0]}\] _+\n(.*?)^(____|====)", text, re.M | re.S)
        assert told is not None
        lines = told.group(1).splitlines()
        assert any(line.startswith("E ") and fault.said in line and f"rank {number % WORLD}" in line for line in lines)
        # The user's own line, none of ours; below it what the ranks did.
        assert [line for line in lines if line.startswith(">")] == [
            line for line in lines if "> " in line and "ranks.run(" in line
        ]
        table = lines[lines.index("--- the ranks") + 1 :][:WORLD]
        assert {row.split("  ")[0] for row in table} == {f"rank {rank}" for rank in range(WORLD)}
        assert table[0].startswith(f"rank {number % WORLD} ")
        assert any(line.startswith("try: ") for line in lines)
    assert trace.left(warm_runs.left()) == []


def start(*args: str) -> subprocess.Popen[str]:
    """A real pytest, in a process group of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.fixture
def announced(plans, monkeypatch):
    """Can be read once a rank of plans/waits.toml waits."""
    os.mkfifo("fifo")
    monkeypatch.setenv("FIFO", str(Path("fifo").resolve()))
    fifo = os.open("fifo", os.O_RDWR)
    yield fifo
    os.close(fifo)


@pytest.mark.usefixtures("ctrl_c")
def test_control_c_in_the_middle_of_a_plan_ends_with_2_writes_no_golden_and_leaves_nothing(announced, trace):
    process = start("plans/plain.toml::golden", "plans/waits.toml::bitwise", "--accept")
    os.read(announced, 1)
    pids = trace.processes()
    assert len(pids) == 1 + 1 + WORLD  # pytest, the server, the ranks
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert trace.left(pids) == []
    assert "KeyboardInterrupt" in output
    assert "golden NOT written: 1 accepted, but the run was interrupted" in output
    assert not list(Path("golden").rglob("*.txt"))


@pytest.mark.usefixtures("ctrl_c")
def test_nothing_is_left_when_the_controller_of_a_worker_is_killed_in_the_middle_of_a_plan(announced, trace):
    """execnet interrupts a worker that still runs 5 s after its controller has gone."""
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    controller = start("-n1", "--fxbucket-plans=plans/waits.toml", "-k", "bitwise")
    os.read(announced, 1)
    pids = trace.processes()
    assert len(pids) == 1 + 1 + 1 + WORLD  # the controller, its worker, the server, the ranks
    controller.kill()
    controller.communicate(timeout=60)
    assert [pid for pid in pids if not ends(pid, limit_s=60)] == []
    assert trace.left(pids) == []
