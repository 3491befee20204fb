"""Whatever goes wrong on a rank is one failure that says which, where and in which collective, and the next job is well."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pytest_fxbucket.ranks.pool import RankFailure
from suites.ranks.fault_jobs import FAULTS

JOBS = "suites.ranks.fault_jobs:"
WORLD = 4
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
# Where what is left behind would lie, and what may be read from there: this repository and what is installed.
SHARED = ("/dev/shm/", "/dev/mqueue/", "/tmp/", "/var/tmp/", "/run/", tempfile.gettempdir())
INSTALLED = (str(Path(__file__).resolve().parents[2]), sys.prefix, sys.base_prefix)


def run(ranks, job, payload=None, timeout_s=60.0, **more):
    return ranks.run(JOBS + job, [payload] * WORLD, timeout_s=timeout_s, **more)


def fail(ranks, job, payload=None, **more):
    ranks.start()  # a time limit is for the job, not for the start of the ranks
    with pytest.raises(RankFailure) as caught:
        run(ranks, job, payload, **more)
    return caught.value


def is_well(ranks):
    return run(ranks, "healthy") == [[4.0] * 3] * WORLD


@pytest.fixture(params=enumerate(FAULTS), ids=[fault.job for fault in FAULTS])
def case(request):
    """A fault and the rank that has it, another one each time."""
    index, fault = request.param
    return fault, index % WORLD


def test_it_is_one_failure_that_says_who_and_where_and_the_next_job_is_well(ranks, watched, case):
    fault, culprit = case
    ranks.start()
    gone = watched(ranks.pids)
    failure = fail(ranks, fault.job, culprit, timeout_s=2.0 if fault.is_late else 60.0)
    assert (failure.kind, failure.rank) == (fault.kind, culprit), "\n".join(failure.lines())
    assert fault.said in str(failure)
    others = [rank for rank in range(WORLD) if rank != culprit]
    assert [row.split("  ")[0] for row in failure.table] == [f"rank {rank}" for rank in (culprit, *others)]
    for rank, row in zip((culprit, *others), failure.table, strict=True):
        assert f'"step 1 of {rank}"' in row
        assert " on ranks 0-3" in row
    assert any(line.startswith("try: ") for line in failure.lines())
    if fault.is_late:
        every_rank_shows_where_it_stands(fault, culprit, failure)
    assert gone() == []
    assert is_well(ranks)


def every_rank_shows_where_it_stands(fault, culprit, failure):
    expected = {"skip_one": "has no job"}.get(fault.job, f"in {fault.job}\n")
    assert expected in failure.stacks[culprit] + "\n"
    call, kind = ("wait", "all_gather") if fault.job == "swap_two" else ("all_reduce", "all_reduce")
    for rank in {*range(WORLD)} - {culprit}:
        assert f"in {fault.job}\n" in failure.stacks[rank] + "\n"
        assert f"in {call}\n" in failure.stacks[rank]
    assert all(f"  waits for {kind}" in row for row in failure.table[1:])


def test_a_crash_shows_where_python_was(ranks):
    assert "in crash\n" in fail(ranks, "crash", 1).stacks[1] + "\n"


def test_of_different_exceptions_the_first_is_the_failure_and_the_others_are_in_the_table(ranks):
    failure = fail(ranks, "raise_differently", (1, 3))
    said = {1: "raised KeyError: 'one cause'", 3: "raised ZeroDivisionError: another"}
    first = min((state for state in failure.states if state.outcome == "raised"), key=lambda state: state.at)
    assert failure.rank == first.rank
    assert said[failure.rank] in str(failure)
    assert said[failure.rank].partition(":")[0].removeprefix("raised ") in failure.traceback
    table = "\n".join(failure.table)
    assert all(f"rank {rank}  {text}" in table for rank, text in said.items())
    assert is_well(ranks)


def test_an_exception_on_all_ranks_is_one_failure(ranks):
    failure = fail(ranks, "raise_on_all")
    assert str(failure).startswith(f"rank {failure.rank} of 4 raised ValueError: {failure.rank} of 4")
    # which was quickest is chance: the lowest stands for all
    assert failure.rank == min(state.rank for state in failure.states if state.outcome == "raised")
    assert is_well(ranks)


@pytest.mark.parametrize("job", ["too_much_memory", "memory_limit"])
def test_for_want_of_memory_it_says_what_to_try(ranks, job):
    lines = [line for line in fail(ranks, job, 0).lines() if line.startswith("try: ")]
    assert any("memory" in line for line in lines)


def test_where_ranks_part_both_sides_are_told(ranks):
    swapped = str(fail(ranks, "swap_two", 2, timeout_s=2.0))
    assert "rank 2 launched reduce_scatter(sum) of 8 float32, ranks 0-1, 3 launched all_gather of 2 float32" in swapped
    other = str(fail(ranks, "other_size", 0))
    assert "rank 0 launched reduce_scatter(sum) of 12 float32, ranks 1-3 launched reduce_scatter(sum) of 8 float32" in other
    left_out = str(fail(ranks, "leave_out_the_last", 1))
    assert left_out.startswith("rank 1 never launched collective 2 of the job on ranks 0-3; ranks 0, 2-3 launched all_reduce")


def test_ctrl_c_in_the_middle_ends_the_ranks_and_the_next_job_is_well(ranks, watched, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    announced = os.open(tmp_path / "fifo", os.O_RDWR)

    def interrupt():
        for _ in range(WORLD):
            os.read(announced, 1)
        os.kill(os.getpid(), signal.SIGINT)

    ranks.start()
    gone = watched(ranks.pids)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(ranks, "announce_and_hang", str(tmp_path / "fifo"))
    thread.join()
    os.close(announced)
    assert gone() == []
    assert is_well(ranks)


def test_ranks_listen_on_loopback_alone(ranks):
    for addresses in run(ranks, "listening"):
        assert addresses  # gloo has a listening socket: were there none, nothing would have been looked at
        assert set(addresses) <= LOOPBACK


def test_no_process_has_a_file_open_that_could_be_left_behind(ranks):
    for names in run(ranks, "opened"):
        assert names  # its own libraries, at least
        assert [name for name in names if name.startswith(SHARED) and not name.startswith(INSTALLED)] == []


def test_logs_are_for_their_owner_alone(ranks, tmp_path):
    fail(ranks, "raise_before", 1, log_dir=tmp_path / "artifacts" / "logs")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "artifacts").rglob("*")}
    assert modes == {"logs": 0o700, **{f"rank{rank}.log": 0o600 for rank in range(WORLD)}}
