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

from pytest_fxbucket.ranks.failure import RankState, failure_of
from pytest_fxbucket.ranks.pool import RankFailure
from suites.ranks.fault_jobs import FAULTS

JOBS, OTHERS = "suites.ranks.fault_jobs:", "suites.ranks.jobs:"
WORLD = 4
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
# Where what is left behind would lie, and what may be read from there: this repository and what is installed.
SHARED = ("/dev/shm/", "/dev/mqueue/", "/tmp/", "/var/tmp/", "/run/", tempfile.gettempdir())
INSTALLED = (str(Path(__file__).resolve().parents[2]), sys.prefix, sys.base_prefix)
# What both sides are told of, where the ranks part.
PARTED = {
    "swap_two": "rank 0 launched reduce_scatter(sum) of 8 float32, ranks 1-3 launched all_gather of 2 float32",
    "other_size": "rank 1 launched reduce_scatter(sum) of 12 float32, ranks 0, 2-3 launched reduce_scatter(sum) of 8 float32",
    "other_root": "rank 2 launched reduce to 1(sum) of 3 float32, ranks 0-1, 3 launched reduce to 0(sum) of 3 float32",
    "other_source": "rank 3 launched broadcast of 0 of 3 float32, ranks 0-2 launched broadcast of 1 of 3 float32",
    "leave_a_message": "rank 0 never received 3 float32 that rank 3 sent",
    "read_other_bits": "rank 0 sent 3 float32 to rank 1, which receives 3 int32",
    "leave_out_the_last": "rank 2 never launched collective 2 of the job on ranks 0-3; ranks 0-1, 3 launched all_reduce",
}


def run(ranks, job, payload=None, timeout_s=60.0, **more):
    return ranks.run(job if ":" in job else JOBS + job, [payload] * WORLD, timeout_s=timeout_s, **more)


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
    assert failure.is_only_late == fault.may_be_slow
    others = [rank for rank in range(WORLD) if rank != culprit]
    assert [row.split("  ")[0] for row in failure.table] == [f"rank {rank}" for rank in (culprit, *others)]
    for rank, row in zip((culprit, *others), failure.table, strict=True):
        assert f'"step 1 of {rank}"' in row
        assert " on ranks 0-3" in row
    advice = [line for line in failure.lines() if line.startswith("try: ")]
    assert any(line for line in advice if fault.said != "memory" or "memory" in line)
    assert PARTED.get(fault.job, "") in str(failure)
    if fault.is_late:
        late = "3 of 4 ranks" if fault.job == "skip_one" else "4 of 4 ranks"
        assert str(failure).startswith(f"{late} did not answer within 2 s; rank {culprit}: ")
        every_rank_shows_where_it_stands(fault, culprit, failure)
    if fault.job == "crash":
        assert "in crash\n" in failure.stacks[culprit] + "\n"
    assert gone() == []
    assert is_well(ranks)


def every_rank_shows_where_it_stands(fault, culprit, failure):
    is_struck = fault.job in ("stop", "loop", "hold_the_lock")
    expected = {"skip_one": "has no job"}.get(fault.job, f"in {fault.job}\n")
    assert expected in failure.stacks[culprit] + "\n"
    call, kind = ("wait", "all_gather") if fault.job == "swap_two" else ("all_reduce", "all_reduce")
    for rank in {*range(WORLD)} - {culprit}:
        assert f"in {'job' if is_struck else fault.job}\n" in failure.stacks[rank] + "\n"
        assert f"in {call}\n" in failure.stacks[rank]
    assert all(f"  waits for {kind}" in row for row in failure.table[1:])


@pytest.mark.parametrize(("processes", "first"), [("SRT", 2), ("SR", 1), (["", "R"], 1), (["-", "S"], 1)])
def test_of_late_ranks_the_first_is_one_that_holds_up_the_others(processes, first):
    late = [RankState(rank, process=process) for rank, process in enumerate(processes)]
    assert failure_of(late, task="job", timed_out_s=1.0).rank == first


def test_the_one_late_rank_is_named_and_not_one_that_returned(ranks):
    failure = fail(ranks, "one_too_many", 2, timeout_s=2.0)
    assert str(failure).startswith("rank 2 of 4 did not answer within 2 s; rank 0: returned")
    assert "ranks 0-1, 3 never launched collective 2" in str(failure)


def test_who_sends_nothing_to_a_rank_that_waits_is_named(ranks):
    failure = fail(ranks, "wait_for_a_message", 2, timeout_s=2.0)
    said = "rank 1 of 4 did not answer within 2 s; rank 2: returned; rank 2 never sent 3 float32 that rank 1 receives"
    assert str(failure).startswith(said)
    assert is_well(ranks)


def test_of_ranks_that_raised_alike_the_first_to_fail_is_none_that_lost_a_peer():
    raised = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    reduce(x)\nRuntimeError: x\n'
    lost = RankState(0, "raised", 1.0, "Connection closed by peer [127.0.0.1]:4242", "RuntimeError", raised)
    own = RankState(1, "raised", 2.0, "Invalid scalar type", "RuntimeError", raised)
    assert lost.is_effect
    assert failure_of([lost, own], task="job", timed_out_s=None).rank == 1


def test_a_rank_that_raises_is_named_with_its_traceback_first(ranks, tmp_path):
    logs = tmp_path / "artifacts" / "logs"
    failure = fail(ranks, OTHERS + "raise_on", 2, what="bitwise of a plan", log_dir=logs)
    assert (failure.kind, failure.rank, failure.error_type) == ("raised", 2, "ValueError")
    assert str(failure) == (
        'rank 2 of 4 raised ValueError: no good on rank 2, at "step 2" (bitwise of a plan, job suites.ranks.jobs:raise_on)'
    )
    assert failure.traceback.startswith("Traceback")
    assert "in raise_on" in failure.traceback
    assert "worker.py" not in failure.traceback
    assert [line.split("  ")[0] for line in failure.table] == ["rank 2", "rank 0", "rank 1", "rank 3"]
    assert failure.table[1] == (
        'rank 0  is still waiting                      "step 0"  waits for all_reduce(sum) of 3 float32, number 1 on ranks 0-3'
    )
    lines = list(failure.lines())
    assert lines[:2] == [str(failure), "--- rank 2, traceback"]
    assert lines.index("ValueError: no good on rank 2") < lines.index("--- the ranks")
    assert failure.output[2] == (logs / "rank2.log").read_text() == "printed by 2\n"
    assert lines[-2:] == ["--- rank 2, end of its output", "printed by 2"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "artifacts").rglob("*")}
    assert modes == {"logs": 0o700, **{f"rank{rank}.log": 0o600 for rank in range(WORLD)}}  # for their owner alone
    assert is_well(ranks)


def test_ranks_that_raise_at_different_places_show_each_place_once(ranks):
    failure = fail(ranks, OTHERS + "raise_here_and_there")
    shown = [line for line in failure.lines() if line.startswith("--- rank ") and line.endswith("traceback")]
    assert len(shown) == 2
    assert {"KeyError: 'even'", "ValueError: odd"} <= set(failure.lines())


@pytest.mark.parametrize("job", ["raise_after_peer_left", "late_cause"])
def test_connection_errors_of_the_others_do_not_hide_the_cause(ranks, job):
    failure = fail(ranks, OTHERS + job, 3)
    assert failure.rank == 3
    assert "the cause" in failure.traceback
    assert all("lost the connection to a peer" in line for line in failure.table[1:])


def test_a_payload_that_cannot_be_pickled_is_named_before_anything_runs(ranks):
    failure = fail(ranks, OTHERS + "echo", lambda: None)
    assert failure.kind == "unpicklable"
    assert "the payload for rank 0 cannot be pickled" in str(failure)


@pytest.mark.parametrize("job", ["no_such_function", "no.such.module:f"])
def test_a_job_that_does_not_exist_fails_with_its_name(ranks, job):
    with pytest.raises(RankFailure, match=r"no_such_function|No module named 'no'"):
        run(ranks, job)


def test_a_rank_killed_between_two_jobs_is_replaced(ranks, watched):
    ranks.start()
    gone = watched(ranks.pids[1:2])
    os.kill(ranks.pids[1], 9)
    assert gone() == []
    assert is_well(ranks)


def test_a_killed_server_is_replaced(ranks, watched):
    (server, *_) = run(ranks, OTHERS + "parent_of")
    gone = watched([server, *ranks.pids])
    os.kill(server, 9)
    assert gone() == []
    assert is_well(ranks)


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


def test_a_rank_that_wants_more_than_its_part_of_a_gpu_is_told_what_divides_it(ranks):
    failure = fail(ranks, "beyond_its_share", 2)
    assert str(failure).startswith("rank 2 of 4 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 60.00 GiB.")
    (advice,) = (line for line in failure.lines() if line.startswith("try: "))
    assert advice.startswith("try: let fewer ranks share a GPU (run.ranks_per_gpu of a plan: each has an equal part")


@pytest.mark.usefixtures("ctrl_c")
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
