"""Losses in chunks that are captured wrongly: ``bitwise`` is green, since both graphs are wrong alike, ``eager`` is red."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket import plan_on_mesh
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.eager.wrong_captures import Fault, faulty
from suites.eager.wrong_losses import LOSSES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", LOSSES, ids=[fault.__name__ for fault in LOSSES])
def test_a_wrong_loss_is_red_here_alone(fault: Fault, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_on_mesh.capture_plan
    row, words = LOSSES[fault]
    (plan,) = [one for one in load_plans(ROOT / "fixtures/plans/chunked.toml") if one.matrix_id == row]

    def wrong(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
        return faulty(right(plan, mesh, rank), fault)

    monkeypatch.setattr(plan_on_mesh, "capture_plan", wrong)
    run = PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path), pools)
    bitwise = run.check("bitwise")
    assert bitwise, bitwise
    verdict = run.check("eager")
    assert verdict.outcome == "failed"
    said = "\n".join(verdict.lines)
    for one in words:
        assert one in said
