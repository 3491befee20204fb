"""Graphs that somebody else traced: run as they are, checked as far as their roles go, refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.models import traced
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.given_graphs import TracedStep, take_step
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Graph
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import encode_module

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 4
(PLAN,) = load_plans(ROOT / "fixtures" / "plans" / "traced.toml")
BARE = replace(PLAN, graph=Graph("fixtures.models.traced:bare"))


def run_of(plan: Plan, pools: Pools, tmp_path: Path) -> PlanRun:
    settings = RunSettings(rootdir=ROOT, golden_dir=tmp_path / "golden", artifacts=tmp_path / "artifacts", accept="all")
    return PlanRun(plan, settings, pools, accept_golden=lambda path, text: None)


def outcome(verdict: Verdict) -> tuple[str, tuple[str, ...]]:
    return verdict.outcome, verdict.lines


def test_a_traced_step_with_roles_passes_all_four_checks(pools: Pools, tmp_path: Path) -> None:
    run = run_of(PLAN, pools, tmp_path)
    for check in ("audit", "golden", "collectives", "same", "bitwise"):
        assert outcome(run.check(check)) == ("passed", ())
    assert "6 gradients" in run.check("bitwise").summary
    summary = run.summary()
    assert summary is not None
    assert (summary.launches_before, summary.launches_after) == (14, 8)


def test_a_bare_graph_is_bucketed_run_and_compared_but_cannot_be_audited(pools: Pools, tmp_path: Path) -> None:
    run = run_of(BARE, pools, tmp_path)
    with pytest.raises(CaptureError, match=r"audit needs the roles .* return a TracedStep .* or set checks\.audit = false"):
        run.check("audit")
    assert outcome(run.check("collectives")) == ("passed", ())
    verdict = run.check("bitwise")
    assert outcome(verdict) == ("passed", ())
    assert "7 outputs" in verdict.summary
    report = run.bucketed.report  # by the modules of its nodes
    assert report is not None
    assert len(report.buckets) == 8


def test_each_rank_gives_inputs_of_its_own(pools: Pools) -> None:
    first, last = (capture_plan(PLAN, shard_mesh(RANKS), rank).example_inputs["joint"] for rank in (0, RANKS - 1))
    assert all(a.shape == b.shape and not a.equal(b) for a, b in zip(first, last, strict=True))
    assert all(isinstance(tensor, Tensor) and type(tensor) is Tensor for tensor in first)


def test_the_fixtures_gradients_are_those_of_autograd(pools: Pools) -> None:
    steps = [capture_plan(PLAN, shard_mesh(RANKS), rank) for rank in range(RANKS)]
    tasks = [(encode_module(step.graphs["joint"]), step.example_inputs["joint"]) for step in steps]
    results: list[Any] = pools.get(RANKS).run("parity_jobs:graph_once", tasks, timeout_s=60, paths=[str(HERE), str(ROOT)])
    inputs = [step.example_inputs["joint"] for step in steps]
    full = [torch.cat(shards).requires_grad_() for shards in zip(*(given[:-2] for given in inputs), strict=True)]
    losses = []
    for *_, x, target in inputs:
        for weight, bias in zip(full[::2], full[1::2], strict=True):
            x = torch.tanh(x @ weight.t() + bias)
        losses.append((x - target).square().mean())
    torch.stack(losses).mean().backward()
    for rank, (loss, *grads) in enumerate(results):
        torch.testing.assert_close(loss, losses[rank].detach())
        for grad, parameter in zip(grads, full, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(grad, parameter.grad.chunk(RANKS)[rank])


def test_a_traced_step_knows_its_parameters() -> None:
    step = capture_plan(PLAN, shard_mesh(RANKS), 0)
    assert step.has_roles
    assert [(p.fqn, p.shape, p.shard_shape, p.trainable) for p in step.parameters[:2]] == [
        ("layers.0.weight", (8, 8), (2, 8), True),
        ("layers.0.bias", (8,), (2,), True),
    ]
    assert step.modules == ("", "layers", "layers.0", "layers.1", "layers.2")
    assert not capture_plan(BARE, shard_mesh(RANKS), 0).has_roles


@pytest.fixture(scope="module")
def step() -> TracedStep:
    with fake_world(0, RANKS):
        return traced.step()


def described(of: str, side: str, change: Any) -> Any:
    """A step with other ``roles`` or ``fqns`` of its inputs or outputs."""

    def changed(step: TracedStep) -> TracedStep:
        joint = {one: list(getattr(step, of)["joint"][one]) for one in ("inputs", "outputs")}
        return replace(step, **{of: {"joint": joint | {side: change(joint[side])}}})

    return changed


def given(change: Any) -> Any:
    """A step with other inputs."""
    return lambda step: replace(step, inputs={"joint": change(list(step.inputs["joint"]))})


WANTED = (
    "graphs are to be joint, or forward and backward (or input and weight) with unshard before and reduce behind them where "
    "they are split off, but the TracedStep has"
)
REFUSED: dict[str, tuple[Any, str]] = {
    "no step": (lambda step: 3, "gave a value of type int, expected a TracedStep or a tuple (gm, inputs)"),
    "no graphs": (lambda step: TracedStep({}, {}), f"{WANTED} none"),
    "another graph": (lambda step: replace(step, graphs={"train": step.graphs["joint"]}), f"{WANTED} train"),
    "half of the graphs": (lambda step: replace(step, graphs={"forward": step.graphs["joint"]}), f"{WANTED} forward"),
    "no graph": (
        lambda step: replace(step, graphs={"joint": step.graphs["joint"].forward}),
        "the joint graph is a value of type method, expected a GraphModule",
    ),
    "no inputs": (lambda step: replace(step, inputs={}), "gave no inputs for its joint graph"),
    "too few inputs": (given(lambda inputs: inputs[:-1]), "joint graph takes 8 inputs, but 7 tensors are given"),
    "no tensor": (
        given(lambda inputs: [*inputs[:-1], 3]),
        "input 7 of the joint graph is a value of type int, expected a tensor",
    ),
    "too few roles": (
        described("roles", "inputs", lambda roles: roles[:-1]),
        "joint graph has 8 inputs, but 7 roles and 8 FQNs are given for them",
    ),
    "too many names": (
        described("fqns", "outputs", lambda names: [*names, "more"]),
        "joint graph has 7 outputs, but 7 roles and 8 FQNs are given for them",
    ),
    "an unknown role": (
        described("roles", "inputs", lambda roles: ["parm", *roles[1:]]),
        "joint inputs have the unknown role 'parm'; known are param, buffer, held, state, hyper, batch, loss, grad, value",
    ),
    "a parameter twice": (
        described("fqns", "inputs", lambda names: [names[1], *names[1:]]),
        "joint inputs have the parameter 'layers.0.bias' more than once",
    ),
    "a gradient of no parameter": (
        described("fqns", "outputs", lambda names: ["", "layers.0.wieght", *names[2:]]),
        "there is a gradient of 'layers.0.wieght', but no input of role param has that FQN; did you mean \"layers.0.weight\"?",
    ),
    "roles of no graph": (
        lambda step: replace(step, roles={**step.roles, "backward": {"inputs": []}}),
        "roles are given for backward, of which the TracedStep has no graph",
    ),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_step_whose_roles_cannot_be_is_refused(change: Any, said: str, step: TracedStep) -> None:
    with pytest.raises(CaptureError) as caught:
        take_step(change(step), PLAN, shard_mesh(RANKS), 0)
    found = str(caught.value)
    assert found.startswith("[graph] factory fixtures.models.traced:step")
    assert found.removeprefix("[graph] factory fixtures.models.traced:step").lstrip(": ") == said


def test_a_factory_that_raises_is_told_with_its_name() -> None:
    plan = replace(PLAN, graph=Graph("capture_models:raises"))
    with pytest.raises(
        CaptureError,
        match=r"^\[graph\] factory capture_models:raises failed at suites/capture/capture_models\.py:\d+ in raises",
    ):
        capture_plan(plan, shard_mesh(RANKS), 0)
