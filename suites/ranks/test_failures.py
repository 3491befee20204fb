"""Each way in which a rank can fail leads to the rank and the cause, and the next job runs."""

from __future__ import annotations

import os

import pytest

from pytest_fxbucket.ranks.pool import RankFailure

JOBS = "suites.ranks.jobs:"


def fail(ranks, job, payload, timeout_s=30.0, **more):
    with pytest.raises(RankFailure) as caught:
        ranks.run(JOBS + job, [payload] * ranks.world, timeout_s=timeout_s, **more)
    assert ranks.run(JOBS + "sum_of_ones", [None] * ranks.world, timeout_s=30) == [[ranks.world] * 3] * ranks.world
    return caught.value


def test_a_rank_that_raises_is_named_with_its_traceback(ranks):
    failure = fail(ranks, "raise_on", 2, what="bitwise of a plan")
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


def test_the_first_lines_are_the_first_rank_that_failed(ranks):
    lines = list(fail(ranks, "raise_on", 3).lines())
    assert lines[0].startswith("rank 3 of 4 raised ValueError")
    assert lines[1] == "--- rank 3, traceback"
    assert lines.index("ValueError: no good on rank 3") < lines.index("--- the ranks")


def test_ranks_that_raise_at_different_places_show_each_place_once(ranks):
    failure = fail(ranks, "raise_here_and_there", None)
    shown = [line for line in failure.lines() if line.startswith("--- rank ") and line.endswith("traceback")]
    assert len(shown) == 2
    assert {"KeyError: 'even'", "ValueError: odd"} <= set(failure.lines())


@pytest.mark.parametrize("job", ["raise_after_peer_left", "late_cause"])
def test_connection_errors_of_the_others_do_not_hide_the_cause(ranks, job):
    failure = fail(ranks, job, 3)
    assert failure.rank == 3
    assert "the cause" in failure.traceback
    assert all("lost the connection to a peer" in line for line in failure.table[1:])


@pytest.mark.parametrize(
    ("how", "said"),
    [("exit", "exited with status 3"), ("SIGKILL", "was killed by SIGKILL"), ("SIGSEGV", "was killed by SIGSEGV")],
)
def test_a_rank_that_dies_is_named_with_how(ranks, how, said):
    failure = fail(ranks, "die_on", (1, how))
    assert (failure.kind, failure.rank) == ("died", 1)
    assert str(failure).startswith(f'rank 1 of 4 {said}, at "before the all-reduce"')
    if how == "SIGSEGV":
        assert "in die_on" in failure.stacks[1]


def test_a_rank_that_calls_sys_exit_has_failed(ranks):
    failure = fail(ranks, "leave", 0)
    assert (failure.kind, failure.rank, failure.error_type) == ("raised", 0, "SystemExit")


@pytest.mark.parametrize(("job", "said"), [("stop_on", "is stopped"), ("loop_on", "is still running")])
def test_a_rank_that_hangs_gives_every_ranks_stack_soon_after_the_limit(ranks, job, said):
    ranks.run(JOBS + "echo", [1] * 4, timeout_s=30)  # the limit is for the job alone, not for the start of the ranks
    with pytest.raises(RankFailure) as caught:
        ranks.run(JOBS + job, [1] * 4, timeout_s=2)
    failure = caught.value
    assert (failure.kind, failure.rank) == ("timeout", 1)
    assert f"4 of 4 ranks did not answer within 2 s; rank 1: {said}" in str(failure)
    assert [f"in {job}" in failure.stacks[rank] for rank in range(4)] == [True] * 4
    assert "all_reduce" in failure.stacks[0]
    assert ranks.run(JOBS + "sum_of_ones", [None] * 4, timeout_s=30) == [[4.0] * 3] * 4


def test_a_collective_that_one_rank_never_joins_names_those_that_wait(ranks):
    failure = fail(ranks, "never_joins", 2, timeout_s=0.5)
    assert (failure.kind, failure.rank) == ("timeout", 2)
    assert str(failure).startswith(
        "3 of 4 ranks did not answer within 0.5 s; rank 2: returned; "
        "rank 2 never launched collective 1 of the job on ranks 0-3; "
        "ranks 0-1, 3 launched all_reduce(sum) of 3 float32"
    )
    assert failure.table[0].split() == ["rank", "2", "returned"]
    assert "all_reduce" in failure.stacks[3]
    assert failure.stacks[2].endswith("has no job")


def test_a_result_that_cannot_be_pickled_is_named(ranks):
    failure = fail(ranks, "unpicklable", 1)
    assert (failure.kind, failure.rank) == ("unpicklable", 1)
    assert "rank 1 of 4 could not answer: its result, of type function, cannot be pickled" in str(failure)


def test_a_payload_that_cannot_be_pickled_is_named_before_anything_runs(ranks):
    failure = fail(ranks, "echo", lambda: None)
    assert failure.kind == "unpicklable"
    assert "the payload for rank 0 cannot be pickled" in str(failure)


@pytest.mark.parametrize("job", ["no_such_function", "no.such.module:f"])
def test_a_job_that_does_not_exist_fails_with_its_name(ranks, job):
    with pytest.raises(RankFailure, match=r"no_such_function|No module named 'no'"):
        ranks.run(job if ":" in job else JOBS + job, [None] * 4, timeout_s=30)


def test_the_end_of_a_ranks_output_is_kept_and_the_rest_forgotten(ranks):
    failure = fail(ranks, "flood", 20_000)
    assert failure.output[0].rstrip().splitlines()[-1].startswith("line 19999 ")
    assert all(len(text) <= 1 << 16 for text in failure.output.values())


def test_the_end_of_a_log_is_in_the_failure_too(ranks, tmp_path):
    failure = fail(ranks, "flood", 3, log_dir=tmp_path)
    assert failure.output[2] == (tmp_path / "rank2.log").read_text()
    assert any(line.startswith("line 2 ") for line in failure.lines())


def test_a_rank_killed_between_two_jobs_is_replaced(ranks, watched):
    ranks.start()
    gone = watched(ranks.pids[1:2])
    os.kill(ranks.pids[1], 9)
    assert gone() == []
    assert ranks.run(JOBS + "echo", [1] * 4, timeout_s=30) == [1] * 4


def test_a_collective_that_only_some_ranks_launched_is_a_failure_and_does_not_meet_the_next_jobs(ranks):
    with pytest.raises(RankFailure, match=r"^ranks 1-3 never launched collective 1 of the job on ranks 0-3; rank 0 launched"):
        ranks.run(JOBS + "only_some_reduce", [None] * 4, timeout_s=30)
    assert ranks.run(JOBS + "sum_of_ones", [None] * 4, timeout_s=30) == [[4.0] * 3] * 4


def test_a_killed_server_is_replaced(ranks, watched):
    (server, *_) = ranks.run(JOBS + "parent_of", [None] * 4, timeout_s=30)
    gone = watched([server, *ranks.pids])
    os.kill(server, 9)
    assert gone() == []
    assert ranks.run(JOBS + "echo", [1] * 4, timeout_s=60) == [1] * 4


def test_a_mark_that_is_too_long_is_cut(ranks):
    failure = fail(ranks, "mark_at_length", "m" * 300)
    assert f'at "{"m" * 200}"' in str(failure)
