"""Bucketed against unbucketed on real ranks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

HERE = Path(__file__).resolve().parent
PLAN = """
[model]
factory = "pass_models:of_each_kind"
batch = "pass_models:batch"
loss = "pass_models:loss"

[parallel]
dp_shard = 3
{parallel}

[bucket]
plan = ["layers.0", "layers.1+layers.3", "layers.4", "layers.5"]
{bucket}

[overlap]
{overlap}

[run]
steps = 2
timeout_s = 60
"""


@pytest.mark.parametrize(
    ("parallel", "bucket", "overlap"),
    [
        ("", 'layout = "execution"', "prefetch = 2"),
        ('reduce_dtype = "float32"', "", "prefetch = 0\ndefer_reduce = false"),
    ],
)
def test_values_are_those_of_the_unbucketed_step(
    tmp_path: Path, pools: Pools, parallel: str, bucket: str, overlap: str
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(parallel=parallel, bucket=bucket, overlap=overlap))
    (tmp_path / "pass_models.py").symlink_to(HERE / "pass_models.py")
    run = PlanRun(load_plans(plan)[0], RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
    verdict = run.check("bitwise")
    assert verdict.outcome == "passed", [verdict.summary, *verdict.lines]
    assert run.bucketed.report is not None
    assert any(len(bucket.members) > 1 for bucket in run.bucketed.report.buckets)
