"""Wrong captures: ``bitwise`` compares two graphs that are wrong alike and is green, ``eager`` is red and says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket import plan_on_mesh
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.eager.eager_net import plan_of
from suites.eager.wrong_captures import FAULTS, Fault, faulty

ROOT = Path(__file__).parents[2]


def run_of(folder: Path, pools: Pools) -> PlanRun:
    return PlanRun(plan_of(), RunSettings(ROOT, folder / "golden", folder), pools)


def test_the_right_capture_is_green(tmp_path: Path, pools: Pools) -> None:
    verdict = run_of(tmp_path, pools).check("eager")
    assert verdict, verdict
    # a loss, two buffers, and of 15 parameters gradients, themselves and three tensors of state
    assert verdict.summary.startswith("78 tensors a step (loss, gradients, parameters, buffers, state) are those of torch's")


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_a_wrong_capture_is_red_here_alone(fault: Fault, tmp_path: Path, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_on_mesh.capture_plan

    def wrong(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
        return faulty(right(plan, mesh, rank), fault)

    monkeypatch.setattr(plan_on_mesh, "capture_plan", wrong)
    run = run_of(tmp_path, pools)
    assert run.check("bitwise")
    verdict = run.check("eager")
    assert verdict.outcome == "failed"
    assert verdict.summary == "the bucketed step is not shown to be that of torch's FSDP2"
    said = "\n".join(verdict.lines)
    for words in FAULTS[fault]:
        assert words in said
