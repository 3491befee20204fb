"""What the audit says of layers that were traced once and repeated."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

ROOT = Path(__file__).resolve().parents[2]


def test_the_audit_says_which_layers_were_repeated(tmp_path: Path, pools: Pools) -> None:
    (plan,) = load_plans(ROOT / "fixtures" / "plans" / "reuse.toml")
    verdict = PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts"), pools).check("audit")
    assert verdict.outcome == "passed", verdict.lines
    assert verdict.summary == "10 entries as planned on 4 ranks (blocks[0-7] repeated)"
