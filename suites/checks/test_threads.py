"""Bits do not hang on threads: kernels that add as their threads come add in one order on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.checks.conftest import MODEL, PLAN


@pytest.mark.parametrize("check", ["bitwise", "eager"])
def test_rows_that_are_read_often_have_one_gradient_on_several_threads(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cores are this process's, as without pytest-xdist, so that each rank has several threads where there are several."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    model = replace(MODEL, factory="bitwise_models:Picking")
    plan = replace(PLAN, model=model, bucket=Bucket(plan=parse_entries(["rows"], "test"), unplanned="root"))
    pools = Pools()
    try:
        settings = RunSettings(Path(__file__).parent, tmp_path / "golden", tmp_path / "artifacts", backend="local")
        verdict = PlanRun(replace(plan, run=replace(plan.run, steps=6)), settings, pools).check(check)
    finally:
        pools.close()
    assert verdict.outcome == "passed", verdict
