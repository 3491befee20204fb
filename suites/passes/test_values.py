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
factory = "pass_models:{model}"
batch = "pass_models:batch"
loss = "pass_models:loss"

[parallel]
dp_shard = 3
{parallel}

[bucket]
plan = {entries}
{bucket}

[overlap]
{overlap}

[run]
steps = 2
timeout_s = 60
"""
ALL = '["layers.*"]'


@pytest.mark.parametrize(
    ("model", "entries", "options"),
    [
        ("linears", ALL, {}),
        ("uneven", ALL, {"overlap": "prefetch = 2"}),
        ("twice", '["layers.0", "layers.1"]', {}),
        ("dropped", ALL, {}),
        ("late", '["layers.0+layers.2", "layers.1"]', {"bucket": 'layout = "execution"'}),
        ("two_dtypes", ALL, {"parallel": 'reduce_dtype = "float32"'}),
        ("batch_normed", '["layers.0", "layers.1+layers.2"]', {"overlap": "prefetch = 0\ndefer_reduce = false"}),
    ],
)
def test_values_are_those_of_the_unbucketed_step(
    tmp_path: Path, pools: Pools, model: str, entries: str, options: dict[str, str]
) -> None:
    texts = {"parallel": "", "bucket": "", "overlap": "", **options}
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(model=model, entries=entries, **texts))
    (tmp_path / "pass_models.py").symlink_to(HERE / "pass_models.py")
    run = PlanRun(load_plans(plan)[0], RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
    verdict = run.check("bitwise")
    assert verdict.outcome == "passed", [verdict.summary, *verdict.lines]
    assert run.bucketed.report is not None
    assert any(len(bucket.members) > 1 for bucket in run.bucketed.report.buckets)
