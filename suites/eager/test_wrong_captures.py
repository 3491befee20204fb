"""Wrong captures: what compares two graphs finds them wrong alike, ``eager`` is red and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_fxbucket import captured_plan
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import StepGraph
from suites.eager.eager_net import ROOT, Run, plan_of
from suites.eager.wrong_captures import FAULTS, LOSSES, Fault, faulty, gelu_by_tanh

Capture = Callable[[Plan, Mesh, int], StepGraph]
CASES = [(fault, "", words) for fault, words in FAULTS.items()]
CASES += [(fault, row, words) for fault, (row, words) in LOSSES.items()]


def test_the_right_capture_is_green(run: Run) -> None:
    verdict = run(plan_of())
    assert verdict, verdict
    # a loss, two buffers, and of 15 parameters gradients, themselves and three tensors of state
    assert verdict.summary.startswith("78 tensors a step (loss, gradients, parameters, buffers, state) are those of torch's")


@pytest.fixture(scope="module")
def right() -> Capture:
    """capture_plan, which captures each plan once, and gives copies that may be changed."""
    known: dict[str, StepGraph] = {}

    def captured(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
        key = repr((plan, mesh, rank))
        if key not in known:
            known[key] = capture_plan(plan, mesh, rank)
        step = known[key]
        return replace(step, graphs={phase: own_copy(module) for phase, module in step.graphs.items()})

    return captured


@pytest.fixture
def plan(row: str | None) -> Plan:
    chunked = load_plans(ROOT / "fixtures/plans/chunked.toml")
    return plan_of() if row == "" else next(one for one in chunked if one.matrix_id == row)


@pytest.mark.parametrize(("fault", "row", "words"), CASES, ids=[fault.__name__ for fault, _, _ in CASES])
def test_a_wrong_capture_is_red(
    fault: Fault, row: str | None, words: tuple[str, ...], plan: Plan, run: Run, right: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_wrongly(monkeypatch, right, fault)
    verdict = run(plan, anew=True)
    assert verdict.outcome == "failed"
    # One row has a trainer of its own.
    assert row == "backward" or verdict.summary == "the bucketed step is not shown to be that of torch's FSDP2"
    said = "\n".join(verdict.lines)
    assert [one for one in words if one not in said] == []


def test_what_compares_two_graphs_finds_them_wrong_alike(run: Run, right: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_wrongly(monkeypatch, right, gelu_by_tanh)
    assert run(plan_of(), "bitwise", anew=True).outcome == "passed"


def capture_wrongly(monkeypatch: pytest.MonkeyPatch, right: Capture, fault: Fault) -> None:
    def wrong(plan: Plan, mesh: Mesh, rank: int) -> StepGraph:
        return faulty(right(plan, mesh, rank), fault)

    monkeypatch.setattr(captured_plan, "capture_plan", wrong)
