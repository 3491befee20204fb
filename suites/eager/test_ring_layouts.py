"""Where a ring adds, a bucket's order of bytes is part of the step: in FSDP2's it has FSDP2's bits, in another it has not."""

from __future__ import annotations

import re

import pytest

from suites.eager.eager_net import Run

TEXT = """
[model]
factory = "suites.eager.ringed:build"
batch = "suites.eager.ringed:batch"
loss = "suites.eager.ringed:loss"
[parallel]
{parallel}
[bucket]
plan = ["0", "1"]
layout = "{layout}"
[run]
reduce = "{reduce}"
timeout_s = 60
[eager]
rounds_otherwise = [{reason}]
"""
BF16 = 'param_dtype = "bfloat16"\nreduce_dtype = "bfloat16"'
DDP = 'mode = "replicate"\ndp_replicate ='
HYBRID = 'mode = "hybrid_shard"\ndp_shard = 2\ndp_replicate ='
COMMUTES = {"2": "dp_shard = 2", "2 copies": f"{DDP} 2"}
"""x + y is y + x, and halves are exact."""
PARTS = {"hybrid 2 x 3 in bf16": f"{HYBRID} 3\n{BF16}", "3": "dp_shard = 3"}


def plan(parallel: str, layout: str, reduce: str, reason: str = "") -> str:
    return TEXT.format(parallel=parallel, layout=layout, reduce=reduce, reason=reason)


@pytest.mark.parametrize("case", COMMUTES)
def test_where_all_orders_are_one_any_layout_has_torchs_bits(run: Run, case: str) -> None:
    assert run(plan(COMMUTES[case], "execution", "ring")).outcome == "passed"


@pytest.mark.parametrize("case", PARTS)
def test_fsdp2s_order_of_bytes_keeps_its_bits_round_a_ring(run: Run, case: str) -> None:
    right = run(plan(PARTS[case], "registration", "ring"))
    assert right.outcome == "passed"
    assert "sums round a ring" in right.summary


def test_a_tied_parameter_lies_where_it_is_registered_first_in_a_unit(run: Run) -> None:
    text = plan("dp_shard = 4", "registration", "ring").replace("ringed:build", "ringed:tied")
    assert run(text).outcome == "passed"


def test_another_order_of_bytes_is_red_round_a_ring(run: Run) -> None:
    found = run(plan(PARTS["3"], "execution", "ring"))
    assert found.outcome == "failed"
    (line,) = [line for line in found.lines if "moved" in line]
    assert re.fullmatch(
        r"reduce_scatter of 1: its first member that moved is 1\.last\.bias, at byte 0 of a rank's part, and at byte \d+ "
        "in torch's FSDP2; where a ring adds, the order of a sum depends on that",
        line,
    )


def test_entries_that_are_no_units_of_fsdp2_are_red_with_the_first_member_that_moved(run: Run) -> None:
    text = plan("dp_shard = 3", "registration", "ring").replace("ringed:build", "ringed:shared")
    found = run(text.replace('plan = ["0", "1"]', 'plan = ["0", "1"]\nunplanned = "root"'))
    assert found.outcome == "failed"
    (line,) = [line for line in found.lines if "moved" in line]
    assert line.startswith(
        "reduce_scatter of the root: its first member that moved is 2.last.weight, at byte 0 of a rank's part, and"
    )


def test_ddps_own_buckets_are_a_reason_that_then_holds_everything_else(run: Run) -> None:
    parallel, stated = f"{DDP} 3", '"ddp_buckets"'
    own = run(plan(parallel, "registration", "ring"))
    assert (own.outcome, "by design: DistributedDataParallel fills buckets of its own" in own.lines[-1]) == ("failed", True)
    assert run(plan(parallel, "registration", "ring", stated)).outcome == "passed"
    moved = run(plan(parallel, "execution", "ring", stated))
    assert (moved.outcome, sum("all_reduce of " in line for line in moved.lines)) == ("failed", 1)
    there_is_no_ring = run(plan(parallel, "registration", "rank_order", stated))
    said = '[eager] rounds_otherwise states "ddp_buckets", but the model has no such thing; take it out'
    assert there_is_no_ring.lines == (said,)


def test_in_rank_order_any_layout_has_torchs_bits(run: Run) -> None:
    assert run(plan(PARTS["3"], "execution", "rank_order")).outcome == "passed"


def test_bitwise_stays_in_rank_order_and_says_so(run: Run) -> None:
    found = run(plan("dp_shard = 2", "execution", "ring"), "bitwise")
    assert found.outcome == "passed"
    assert "sums in rank order, since round a ring both may rightly part" in found.summary
