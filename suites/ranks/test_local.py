"""All ranks in one process do what ranks in processes do, take turns, keep their state apart, and never hang."""

from __future__ import annotations

import os

import pytest
import torch

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.pool import RankFailure
from pytest_fxbucket.ranks.single_process.scheduler import TurnScheduler
from suites.ranks.fault_jobs import FAULTS

JOBS = "suites.ranks.local_jobs:"
ORDERED = "suites.ranks.ordered_jobs:"


@pytest.fixture(scope="module")
def local(pools):
    return pools.get(4, "local")


def run(pool, job, payload=None, **more):
    job = job if ":" in job else JOBS + job
    return pool.run(job, [payload] * pool.world, **{"timeout_s": 60, **more})


def fail(pool, job, payload=None, **more):
    with pytest.raises(RankFailure) as caught:
        run(pool, job, payload, **more)
    assert run(pool, "turns") == [[0, 1, 2, 3, 3, 0, 1, 2]] * 4
    return caught.value


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize(
    ("job", "payload"),
    [
        ("sums", torch.float32),
        ("sums", torch.bfloat16),
        ("functional_calls", None),
        ("dist_calls", None),
        ("store", None),
        ("meshes", None),
        (ORDERED + "gathers", None),
        (ORDERED + "other_operations", None),
        (ORDERED + "async_in_opposite_orders", None),
        (ORDERED + "ddp_step", None),
        (ORDERED + "fsdp_step", True),
    ],
)
def test_results_are_those_of_gloo_bit_for_bit(ranks, local, job, payload):
    theirs, ours = run(ranks, job, payload), run(local, job, payload)
    if job == "store":  # who is first differs there
        theirs, ours = ([result[:-1] for result in results] for results in (theirs, ours))
    assert same(theirs, ours)


def test_lists_of_any_sizes_are_exchanged(local):
    assert run(local, "all_to_all_lists") == [[[10.0 * r + rank] * (r + 1) for r in range(4)] for rank in range(4)]


def test_ranks_take_turns_in_rank_order(local):
    assert [run(local, "turns") for _ in range(3)] == [[[0, 1, 2, 3, 3, 0, 1, 2]] * 4] * 3


def test_each_rank_keeps_its_own_state(local, tmp_path):
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    for folder in folders:
        (tmp_path / folder).mkdir()
    results = run(local, "own_state", folders)
    assert len({fresh for fresh, _, _ in results}) == 1
    for rank, (_, seen, random) in enumerate(results):
        dtype = [torch.float64, torch.float32][rank % 2]
        assert seen == (str(rank), folders[rank % 2], f"/of/{rank}", dtype, rank == 0, rank)
        assert random not in [other for r, (_, _, other) in enumerate(results) if r != rank]
    assert run(local, "own_state", folders) == results


def test_each_rank_prints_and_warns_for_itself(local):
    printed = {}
    results = run(local, "own_streams_and_filters", on_output=printed.__setitem__)
    assert results == [(f"rank {rank}\n", rank == 1) for rank in range(4)]
    assert printed == {rank: f"behind {rank}\n" for rank in range(4)}


def test_what_torch_keeps_for_a_thread_is_each_fake_ranks_own(fake):
    assert fake.run(JOBS + "own_thread", [None] * 6, timeout_s=60) == [(True, False, "cpu")] * 6


def test_nothing_of_a_job_stays_for_the_next(local):
    assert [run(local, "excepthooks") for _ in range(2)] == [[1] * 4] * 2
    (pid,) = local.pids
    files, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    for _ in range(3):
        run(local, "dist_calls")
    assert len(os.listdir(f"/proc/{pid}/fd")) == files
    assert len(os.listdir(f"/proc/{pid}/task")) <= threads + 4  # the last job's may not be quite gone


def test_payloads_are_not_shared(local):
    assert run(local, "add_one", torch.zeros(2)) == [[1.0, 1.0]] * 4


def test_what_importing_a_module_sets_holds_for_all_ranks(local, tmp_path):
    (tmp_path / "sets_dtype.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\nfrom suites.ranks.local_jobs import default_dtype\n"
    )
    assert run(local, "sets_dtype:default_dtype", paths=[str(tmp_path)]) == [torch.float64] * 4


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_inputs_overwritten_and_outputs_read_before_the_wait_show_in_the_values(local, kind):
    for result, early in run(local, "written_before_wait", kind):
        assert set(result) == {0.0}
        if kind != "all_reduce":  # there it is one tensor
            assert all(value != value for value in early)


def test_output_goes_to_each_ranks_log(local, tmp_path):
    run(local, "say", log_dir=tmp_path)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)]
    assert logs == [f"out of {rank}\nerr of {rank}\nagain {rank}\n" for rank in range(4)]
    assert {(tmp_path / f"rank{rank}.log").stat().st_mode & 0o777 for rank in range(4)} == {0o600}


def test_a_failure_has_the_output_of_the_rank(local, tmp_path):
    failure = fail(local, "say", 2, log_dir=tmp_path)
    assert (failure.kind, failure.rank, failure.error) == ("raised", 2, "said enough")
    assert failure.output[2] == "out of 2\nerr of 2\nagain 2\n"
    assert "in say" in failure.traceback
    assert "play.py" not in failure.traceback


@pytest.mark.parametrize("job", ["leave_one_out", "stubborn"])
def test_a_rank_that_leaves_a_collective_out_is_found_at_once(local, job):
    failure = fail(local, job, 2, timeout_s=600)
    assert (failure.kind, failure.rank) == ("deadlock", 2)
    assert str(failure) == (
        "no rank can go on: rank 2 never launched collective 2 of the job on ranks 0-3; "
        f"ranks 0-1, 3 launched all_reduce(sum) of 5 float32 (job {JOBS}{job})"
    )
    assert [rank for rank, stack in failure.stacks.items() if "in leave_one_out" in stack] == [0, 1, 3]


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_for(local):
    failure = fail(local, "circle", timeout_s=600)
    assert (failure.kind, failure.rank) == ("deadlock", 0)
    assert "rank 0: waits for all_reduce(sum) of 3 float32, number 1 on ranks 0-1;" in str(failure)
    assert "ranks 1-2: waits for all_reduce(sum) of 3 float32, number 1 on ranks 0-2" in str(failure)


def test_a_key_that_nobody_sets_is_found_at_once(local):
    failure = fail(local, "waits_for_a_key", timeout_s=600)
    assert (failure.kind, failure.rank) == ("deadlock", 1)
    assert "rank 1: waits for a key of the store" in str(failure)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("another_kind", "rank 2 launched all_gather of 3 float32, ranks 0-1, 3 launched all_reduce(sum) of 5 float32"),
        ("another_size", "rank 2 launched all_reduce(sum) of 6 float32, ranks 0-1, 3 launched all_reduce(sum) of 5 float32"),
        ("another_slice", "1 float32 arrived where 2 float32 were expected"),
        ("never_waited", "ranks 0-1, 3 never launched collective 1 of the job on ranks 0-3; rank 2 launched all_reduce(sum)"),
    ],
)
def test_ranks_that_launch_something_else_are_named_with_both(local, job, said):
    failure = fail(local, job, 2, timeout_s=600)
    assert failure.kind == "mismatch"
    assert failure.rank == (0 if job == "never_waited" else 2)
    assert said in str(failure)


def test_a_rank_that_raises_comes_before_those_that_wait(local):
    failure = fail(local, "suites.ranks.jobs:raise_on", 2)
    assert (failure.kind, failure.rank, failure.error_type) == ("raised", 2, "ValueError")
    assert str(failure).startswith('rank 2 of 4 raised ValueError: no good on rank 2, at "step 2" (job ')
    assert any(line.startswith("rank 0  is still waiting") for line in failure.table)


# How a process died is told alike for all back ends, and test_faults.py has all ways.
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.job in ("exit_at_once", "crash")], ids=lambda fault: fault.job
)
def test_a_process_that_dies_names_the_rank_whose_turn_it_was(local, fault):
    failure = fail(local, f"suites.ranks.fault_jobs:{fault.job}", 2)
    assert (failure.kind, failure.rank) == ("died", 2)
    assert str(failure).startswith(f'rank 2 of 4 {fault.said}, at "step 1 of 2"')
    assert [state.outcome for state in failure.states] == ["running", "running", "died", "running"]
    if fault.job == "crash":
        assert "in crash" in failure.stacks[2]
        assert "in wait_until" in failure.stacks[3]


def test_ranks_that_had_returned_before_a_death_are_said_to_have(local):
    failure = fail(local, "alone", (2, "exit"))
    assert [state.outcome for state in failure.states] == ["returned", "returned", "died", "running"]


def test_a_rank_that_goes_on_for_ever_is_named_with_all_stacks(local):
    failure = fail(local, "suites.ranks.fault_jobs:loop", 1, timeout_s=2)
    assert (failure.kind, failure.rank) == ("timeout", 1)
    assert 'rank 1: is still running, at "step 1 of 1"' in str(failure)
    assert "in loop" in failure.stacks[1]
    assert "in wait_until" in failure.stacks[0]


def test_a_rank_that_waits_for_a_key_has_not_returned(local):
    failure = fail(local, "waits_for_a_busy_rank", timeout_s=2)
    assert (failure.kind, failure.rank) == ("timeout", 1)
    assert [state.outcome for state in failure.states] == ["running"] * 4


def test_a_result_that_cannot_be_pickled_is_its_ranks(local):
    failure = fail(local, "suites.ranks.fault_jobs:unpicklable", 1)
    assert (failure.kind, failure.rank) == ("unpicklable", 1)


def test_a_rank_may_not_wait_when_it_is_not_its_turn():
    scheduler, errors = TurnScheduler(2, lambda old, new: None), []

    def second():
        try:
            scheduler.wait_until(0, lambda: False)  # as a thread of rank 0's would
        except RuntimeError as error:
            errors.append(str(error))

    scheduler.play([lambda: None, second])
    assert errors == ["rank 0 waits in several threads; with all ranks in one process each may wait in one"]


# Ranks without communication, one after the other, are as many as one likes.


@pytest.fixture(scope="module")
def fake(pools):
    return pools.get(6, "fake")


def fail_alone(pool, payload, timeout_s=60):
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "alone", [payload] * pool.world, timeout_s=timeout_s)
    assert len(pool.run(JOBS + "alone", [None] * pool.world, timeout_s=60)) == pool.world
    return caught.value


def test_each_rank_is_itself_and_begins_fresh(fake):
    results = fake.run(JOBS + "alone", [None] * 6, timeout_s=60)
    assert [result[:4] for result in results] == [(rank, 6, rank, 6) for rank in range(6)]
    assert len({fresh for *_, fresh in results}) == 1


def test_a_thousand_ranks(pools):
    pool = pools.get(1024, "fake")
    results = pool.run(JOBS + "alone", [None] * 1024, timeout_s=120)
    pool.close()
    assert [result[:4] for result in results] == [(rank, 1024, rank, 1024) for rank in range(1024)]


def test_without_communication_the_first_rank_that_raises_ends_the_job(fake):
    failure = fail_alone(fake, (3, "raise"))
    assert (failure.kind, failure.rank, failure.error) == ("raised", 3, "no good")
    assert str(failure).startswith('rank 3 of 6 raised ValueError: no good, at "mark of 3"')
    assert [state.outcome for state in failure.states] == ["returned"] * 3 + ["raised"] + ["was not begun"] * 2


def test_without_communication_a_death_is_of_the_rank_whose_turn_it_was(fake):
    failure = fail_alone(fake, (3, "exit"))
    assert (failure.kind, failure.rank) == ("died", 3)
    assert str(failure).startswith('rank 3 of 6 exited with status 3, at "mark of 3"')
    assert [state.outcome for state in failure.states] == ["returned"] * 3 + ["died"] + ["running"] * 2


def test_without_communication_a_rank_that_goes_on_for_ever_is_named_with_its_stack(fake):
    failure = fail_alone(fake, (3, "loop"), timeout_s=2)
    assert (failure.kind, failure.rank) == ("timeout", 3)
    assert 'rank 3: is still running, at "mark of 3"' in str(failure)
    assert "in alone" in failure.stacks[3]


@pytest.mark.parametrize(("world", "backend", "most"), [(65, "local", 64), (0, "local", 64), ((1 << 16) + 1, "fake", 1 << 16)])
def test_too_many_ranks_are_refused(pools, world, backend, most):
    with pytest.raises(RankError, match=f"a pool of {world} ranks over {backend}; expected 1 to {most}"):
        pools.get(world, backend)


def test_who_reduces_to_another_rank_is_told(local):
    said = str(fail(local, "another_root", 2))
    assert "rank 2 launched reduce to 2(sum) of 3 float32" in said
    assert "launched reduce to 0(sum) of 3 float32" in said
