"""Where a ring adds, a bucket's order of bytes is part of the step: in FSDP2's it has FSDP2's bits, in another it has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.eager.eager_net import plan_of

ROOT = Path(__file__).parents[2]
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
COMMUTES = {"3": "dp_shard = 3", "2 copies": f"{DDP} 2"}
"""x + y is y + x: of two addends there is one order, and of three in a reduce-scatter, whose owner's comes last."""
PARTS = {"4 in fp32": "dp_shard = 4", "hybrid 2 x 3 in bf16": f"{HYBRID} 3\n{BF16}"}


def verdict(
    pools: Pools, folder: Path, parallel: str, layout: str, reduce: str, reason: str = "", check: str = "eager"
) -> Verdict:
    text = TEXT.format(parallel=parallel, layout=layout, reduce=reduce, reason=reason)
    return PlanRun(plan_of(text), RunSettings(ROOT, folder / "golden", folder), pools).check(check)


@pytest.mark.parametrize("case", COMMUTES)
def test_where_all_orders_are_one_any_layout_has_torchs_bits(pools: Pools, tmp_path: Path, case: str) -> None:
    assert verdict(pools, tmp_path, COMMUTES[case], "execution", "ring").outcome == "passed"


@pytest.mark.parametrize("case", PARTS)
def test_fsdp2s_order_of_bytes_keeps_its_bits_and_another_is_red_round_a_ring_alone(
    pools: Pools, tmp_path: Path, case: str
) -> None:
    parallel = PARTS[case]
    right = verdict(pools, tmp_path, parallel, "registration", "ring")
    assert right.outcome == "passed"
    assert "sums round a ring" in right.summary
    assert verdict(pools, tmp_path, parallel, "execution", "rank_order").outcome == "passed"
    found = verdict(pools, tmp_path, parallel, "execution", "ring")
    assert found.outcome == "failed"
    (line,) = [line for line in found.lines if "moved" in line]
    assert re.fullmatch(
        r"reduce_scatter of 1: its first member that moved is 1\.last\.bias, at byte 0 of a rank's part, and at byte \d+ "
        "in torch's FSDP2; where a ring adds, the order of a sum depends on that",
        line,
    )


def test_ddps_own_buckets_are_a_reason_that_then_holds_everything_else(pools: Pools, tmp_path: Path) -> None:
    parallel, stated = f"{DDP} 3", '"ddp_buckets"'
    own = verdict(pools, tmp_path, parallel, "registration", "ring")
    assert (own.outcome, "by design: DistributedDataParallel fills buckets of its own" in own.lines[-1]) == ("failed", True)
    assert verdict(pools, tmp_path, parallel, "registration", "ring", stated).outcome == "passed"
    moved = verdict(pools, tmp_path, parallel, "execution", "ring", stated)
    assert (moved.outcome, sum("all_reduce of " in line for line in moved.lines)) == ("failed", 1)
    there_is_no_ring = verdict(pools, tmp_path, parallel, "registration", "rank_order", stated)
    assert 'states "ddp_buckets", but the model has no such thing' in there_is_no_ring.lines[0]


def test_bitwise_stays_in_rank_order_and_says_so(pools: Pools, tmp_path: Path) -> None:
    found = verdict(pools, tmp_path, "dp_shard = 4", "execution", "ring", check="bitwise")
    assert found.outcome == "passed"
    assert "sums in rank order, since round a ring both may rightly part" in found.summary
