"""What a caller of the pool relies on when nothing goes wrong."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks import mark
from pytest_fxbucket.ranks.pool import RankFailure
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.ranks.server import _import_torch

JOBS = "suites.ranks.jobs:"


def test_results_come_in_rank_order_from_one_group_named_0_whose_processes_stay_warm(ranks):
    results = ranks.run(JOBS + "place", [None] * 4, timeout_s=30)
    assert [r[:5] for r in results] == [(rank, 4, rank, 4, "0") for rank in range(4)]
    assert len({r[5] for r in results}) == 4
    assert ranks.run(JOBS + "place", [None] * 4, timeout_s=30) == results


def test_each_rank_gets_its_own_payload(ranks):
    assert ranks.run(JOBS + "echo", ["a", "b", {"c": 1}, None], timeout_s=30) == ["a", "b", {"c": 1}, None]


def test_the_same_pool_for_the_same_size(pools):
    assert pools.get(4) is pools.get(4)
    assert pools.get(3) is not pools.get(4)


def test_too_few_payloads_are_refused(ranks):
    with pytest.raises(ValueError, match="3 payloads for 4 ranks"):
        ranks.run(JOBS + "echo", [None] * 3, timeout_s=30)


def test_an_unknown_backend_is_named(pools):
    with pytest.raises(RankError, match='no ranks for backend "ncl"; expected one of gloo, gloo:cuda, nccl, local, fake'):
        pools.get(4, "ncl")


@pytest.mark.parametrize("world", [0, -1, 65])
def test_an_impossible_size_is_refused(pools, world):
    with pytest.raises(RankError, match=f"a pool of {world} ranks; expected 1 to 64"):
        pools.get(world)


def test_ranks_see_the_parents_folder_environment_and_path(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("FXBUCKET_TEST", "seen")
    monkeypatch.syspath_prepend("/somewhere")
    folder = str(tmp_path)
    path = [os.getcwd(), *sys.path]  # this file's job is found from the root
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", path)
    cwd, environ, found = ranks.run(JOBS + "surroundings", [None] * 4, timeout_s=30, paths=["/first"])[1]
    assert cwd == folder
    assert environ["FXBUCKET_TEST"] == "seen"
    assert found == ["/first", *path]


def test_what_one_job_spoils_the_next_does_not_see(ranks):
    before = ranks.run(JOBS + "inspect_state", [None] * 4, timeout_s=30)
    ranks.run(JOBS + "spoil", [None] * 4, timeout_s=30)
    assert ranks.run(JOBS + "inspect_state", [None] * 4, timeout_s=30) == before
    assert before[0]["rand"] == before[3]["rand"]


def test_threads_of_all_ranks_fit_the_cores(ranks):
    limit = max(1, len(os.sched_getaffinity(0)) // 4)
    assert ranks.run(JOBS + "threads", [None] * 4, timeout_s=30) == [limit] * 4


def test_an_edited_model_file_is_read_again(ranks, tmp_path):
    model = tmp_path / "edited_model.py"
    helper = tmp_path / "edited_helper.py"
    model.write_text("from edited_helper import VALUE\n")
    helper.write_text("VALUE = 1\n")
    run = dict(timeout_s=30, paths=[str(tmp_path)])
    assert ranks.run(JOBS + "value_of", ["edited_model"] * 4, **run) == [1] * 4
    helper.write_text("VALUE = 22\n")
    assert ranks.run(JOBS + "value_of", ["edited_model"] * 4, **run) == [22] * 4


def test_models_of_one_name_in_two_folders_are_not_mixed_up(ranks, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin_model.py").write_text(f"VALUE = {folder!r}\n")
    for folder in "aba":
        paths = [str(tmp_path / folder)]
        assert ranks.run(JOBS + "value_of", ["twin_model"] * 4, timeout_s=30, paths=paths) == [folder] * 4


def test_ranks_leave_no_files_beside_the_users(ranks, tmp_path):
    (tmp_path / "clean_model.py").write_text("VALUE = 3\n")
    ranks.run(JOBS + "value_of", ["clean_model"] * 4, timeout_s=30, paths=[str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["clean_model.py"]


def test_output_of_each_rank_is_in_its_log(ranks, tmp_path):
    ranks.run(JOBS + "shout", [None] * 4, timeout_s=30, log_dir=tmp_path / "logs")
    for rank in range(4):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"err of {rank}", f"out of {rank}", "raw"]


def test_tensors_of_many_megabytes_travel_both_ways(ranks):
    sent = torch.randn(1 << 21)
    results = ranks.run(JOBS + "echo", [sent] * 4, timeout_s=60)
    assert all(torch.equal(result, sent) for result in results)
    assert [r[-1].item() for r in ranks.run(JOBS + "sized", [8] * 4, timeout_s=60)] == [0.0, 1.0, 2.0, 3.0]


def test_a_mark_outside_of_a_rank_is_harmless():
    mark("nowhere")


def test_ctrl_c_does_not_reach_the_ranks(ranks):
    assert ranks.run(JOBS + "sigint_is_ignored", [None] * 4, timeout_s=30) == ["still here"] * 4


def test_ranks_hold_none_of_each_others_sockets(ranks):
    held = ranks.run(JOBS + "sockets", [None] * 4, timeout_s=30)
    assert sum(len(one) for one in held) == len(set().union(*held))


def test_process_groups_of_one_job_are_gone_in_the_next(ranks):
    ranks.run(JOBS + "make_groups", [None] * 4, timeout_s=60)
    before = ranks.run(JOBS + "holdings", [None] * 4, timeout_s=60)
    for _ in range(3):
        ranks.run(JOBS + "make_groups", [None] * 4, timeout_s=60)
    assert ranks.run(JOBS + "holdings", [None] * 4, timeout_s=60) == before


def test_dtensor_takes_no_process_group_of_a_job_before(ranks):
    for groups_before in (0, 2, 0):
        assert ranks.run(JOBS + "summed_by_dtensor", [groups_before] * 4, timeout_s=30) == [2.0, 2.0, 10.0, 10.0]


def test_a_module_to_import_before_that_is_not_there_is_why_the_server_does_not_start():
    """Each rank would import what it is called now, and nobody would see why that takes so long."""
    missing = "fixtures.reference.missing.deeper"
    assert _import_torch([missing]) == f"there is no module {missing}, which it has to import before it forks ranks"


def test_ranks_are_forked_when_modules_are_loaded_those_asked_for_and_that_of_a_job_of_ours_but_not_a_users(watched):
    """However soon the first job comes. What one of them raises is left for the rank whose job needs it.

    The server would end with it, and with all ranks; a newer torch without a private name raises AttributeError.
    """
    before = set(os.listdir("/proc/self/fd"))
    raising, ours, users = "suites.ranks.raises_at_import", "pytest_fxbucket.checks.bitwise.job", "suites.ranks.odd_jobs"
    pools = Pools(warm=(raising, "torch._dynamo"))
    try:
        assert pools.get(2).run(JOBS + "is_loaded", ["torch._dynamo"] * 2, timeout_s=60) == [True, True]
        with pytest.raises(RankFailure, match="raised AttributeError: torch has no such name"):
            pools.get(2).run(f"{raising}:job", [None] * 2, timeout_s=30)
        for module, loaded in ((users, False), (ours, True)):
            pools.get(2).close()
            pools.get(2).start(job=f"{module}:run")
            assert pools.get(2).run(JOBS + "is_loaded", [module] * 2, timeout_s=60) == [loaded] * 2
        close_ends_all_and_may_be_called_twice(pools, watched, before)
    finally:
        pools.close()


def close_ends_all_and_may_be_called_twice(pools, watched, before):
    """Server and ranks, and it leaves no descriptor but those that were there `before`."""
    (server, _) = pools.get(2).run(JOBS + "parent_of", [None] * 2, timeout_s=60)
    gone = watched([server, *pools.get(2).pids])
    watching = set(os.listdir("/proc/self/fd"))
    pools.close()
    assert gone() == []
    pools.close()
    assert not os.path.exists(f"/proc/{server}")
    # those that watch are open still
    assert len(set(os.listdir("/proc/self/fd")) - before) == 3 < len(watching - before)
