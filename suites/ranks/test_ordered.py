"""The bits of a reduction depend on the ranks' values alone, or a bitwise check would blame plans for gloo's order."""

from __future__ import annotations

import os

import pytest
import torch

from pytest_fxbucket.ranks.pool import RankFailure

JOBS = "suites.ranks.ordered_jobs:"


def run(pools, world, job, payload=None):
    return pools.get(world).run(JOBS + job, [payload] * world, timeout_s=20)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("world", [3, 4])
def test_bucketed_equals_separate_bit_for_bit(pools, world, dtype, op):
    for results in run(pools, world, "separate_and_bucketed", (dtype, op)):
        assert results == dict.fromkeys(results, True)


def test_the_values_of_these_tests_can_tell_orders_apart(pools):
    assert run(pools, 4, "gloos_own") == [False] * 4


def test_all_gathers_of_every_form_collect_in_rank_order(pools):
    whole = [float(rank) for rank in range(4) for _ in range(3)]
    plus = [value + 1 for value in whole]
    assert run(pools, 4, "gathers") == [(whole, whole, whole, [whole, plus])] * 4


def test_launches_on_two_groups_in_opposite_orders_do_not_deadlock(pools):
    assert run(pools, 4, "async_in_opposite_orders") == [(10.0, 10.0, True)] * 4


def test_sub_groups_and_meshes_are_ordered_too(pools):
    assert run(pools, 4, "new_groups") == [("OrderedGloo", "0", True)] * 4


def test_other_reductions_and_uneven_or_empty_ones_work(pools):
    results = run(pools, 4, "other_operations")
    for rank, found in enumerate(results):
        assert found["MAX"] == [4, 7]
        assert found["MIN"] == [1, 1]
        assert found["PRODUCT"] == [24, 105]
        assert found["SUM"] == [10, 16]
        assert found["BOR"] == [7, 7]
        assert found["uneven"] == [4.0 * rank] * (rank + 1)
        assert found["objects"] == [{"rank": r} for r in range(4)]
        assert found["scattered"] == ([rank] * 2, [[r] * 2 for r in range(4)] if rank == 2 else None)
        assert found["strided"] == [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]]
        assert found["bare"] == [3.0, 3.0 if rank == 2 else rank]
    assert results[1]["reduce"] == 6.0
    assert results[0]["reduce"] == 0.0


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_factor_of_fsdp2s_multiplies_each_addend(pools, backend):
    """torchtitan sets one, to add gradients that its loss has divided already."""
    assert pools.get(3, backend).run(JOBS + "divided_by_a_factor", [None] * 3, timeout_s=20) == [True] * 3


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_conjugated_view_adds_up_by_its_values_and_slices_must_lie_as_they_read(pools, backend):
    said = ["all_to_all_single of a tensor of strides (1, 3); make it contiguous() first"] * 2
    own = [[[sum(2 * rank + i + r for r in range(3)) * (1 - 1j) for i in range(2)], said] for rank in range(3)]
    assert [list(one) for one in pools.get(3, backend).run(JOBS + "odd_tensors", [None] * 3, timeout_s=20)] == own


def test_an_average_of_integers_is_refused(pools):
    with pytest.raises(RankFailure, match=r"an average of torch\.int64"):
        run(pools, 4, "bad_average")


def test_a_reduce_scatter_that_ranks_cannot_share_is_refused(pools):
    with pytest.raises(RankFailure, match="5 elements, which 4 ranks cannot share evenly"):
        run(pools, 4, "uneven_tensor")


@pytest.mark.parametrize("precision", [False, True], ids=["fp32", "bf16 with fp32 reduction"])
@pytest.mark.parametrize("world", [3, 4])
def test_fully_shard_gives_the_same_gradients_in_any_bucketing(pools, world, precision):
    for (loss_apart, apart), (loss_together, together) in run(pools, world, "fsdp_step", precision):
        assert torch.equal(loss_apart, loss_together)
        assert {name for name in apart if not torch.equal(apart[name], together[name])} == set()
        assert sum(grad.abs().sum().item() for grad in apart.values()) > 0


def test_ddp_works_over_the_ordered_group(pools):
    results = run(pools, 4, "ddp_step")
    assert results[1:] == results[:-1]


def test_collectives_in_quick_succession_never_lock_each_other_out(pools):
    assert run(pools, 4, "every_collective_many_times", 150) == ["through"] * 4


# Gloo as it is, for timing: it goes around the launch of torch's that corrupts memory.


def test_all_gathers_go_to_plain_gloo_one_by_one_and_bring_what_they_should(pools):
    for arrived, called in pools.get(2, "gloo:plain").run("suites.ranks.jobs:gathers_in_flight", [5, 5], timeout_s=60):
        assert arrived == [[float(number)] * 3 + [10.0 + number] * 3 for number in range(5)]
        assert "c10d::_allgather_base_" in called


def test_one_of_several_tensors_over_plain_gloo_is_refused(pools):
    with pytest.raises(RankFailure, match="an all-gather of several tensors at once cannot be timed over gloo; use nccl"):
        pools.get(2, "gloo:plain").run("suites.ranks.jobs:gather_of_several", [None] * 2, timeout_s=60)


def test_plain_gloo_gathers_one_by_one_where_warnings_are_errors(warm_runs, tmp_path):
    code = (
        "import warnings; from pytest_fxbucket.compat import c10d; "
        "warnings.simplefilter('error'); c10d.gather_one_by_one(); print('ok')"
    )
    done = warm_runs.run(["-c", code], tmp_path, {"PYTHONPATH": os.getcwd()})
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
