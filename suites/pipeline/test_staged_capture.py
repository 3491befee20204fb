"""Stages of a plan as they are captured: what each computes, what crosses, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.capture.names import STAGE, StageMarks
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import CaptureError, StageError
from pytest_fxbucket.pipeline.captured import StagedStep
from pytest_fxbucket.pipeline.rank_stage import _own, wire
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.pipelined import Crossing

STAGED = "suites.pipeline.staged_models"
PLAN = """
[model]
factory = "suites.pipeline.staged_models:build"
args = { name = "NAME" }
batch = "suites.pipeline.staged_models:batch"
loss = "suites.pipeline.staged_models:loss"

[parallel]
pp = 3

[pipeline]
cuts = ["blocks.0", "blocks.1"]
schedule = "1F1B"

[step]
microbatches = 3

[bucket]
plan = ["blocks.[0-2]"]

[checks]
eager = false

[run]
steps = 2
timeout_s = 60
"""


def plan_of(folder: Path, name: str, step: str = "") -> Plan:
    path = folder / f"{name}.toml"
    path.write_text(PLAN.replace("NAME", name).replace("microbatches = 3", f"microbatches = 3\n{step}"))
    return load_plans(path)[0]


def staged_of(plan: Plan) -> StagedStep:
    staged = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual").staged
    assert staged is not None
    return staged


class TestMarks:
    def test_a_stage_ends_behind_the_call_of_a_module(self) -> None:
        marks = StageMarks(["a.b"])
        graph = torch.fx.Graph()
        first, second = graph.placeholder("x"), graph.placeholder("y")
        marks.enter(0)
        marks.enter(1)
        marks.put_on(first)
        marks.leave("a.b", 2)
        marks.put_on(second)
        marks.leave("a", 3)
        assert [node.meta[STAGE] for node in (first, second)] == [0, 1]
        assert marks.calls == {"a.b": [(1, 2)], "a": [(0, 3)]}
        marks.begin()
        assert marks.stage == 0

    def test_without_cuts_no_node_is_marked(self) -> None:
        marks, node = StageMarks(), torch.fx.Graph().placeholder("x")
        marks.put_on(node)
        assert STAGE not in node.meta


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> StagedStep:
    return staged_of(plan_of(tmp_path_factory.mktemp("parts"), "Blocks"))


class TestParts:
    def test_what_a_stage_between_does_not_read_goes_through_it(self, staged: StagedStep) -> None:
        first, second = ({one.name: one.stage for one in flow} for flow in staged.pipelined.forward)
        skipping = {name for name in first.keys() & second.keys() if second[name] == 0}
        assert len(skipping) == 1
        own = {value.fqn for value in staged.parted.part(2, "forward").inputs if value.role == "crossing"}
        assert skipping <= own

    def test_gradients_go_back_to_the_stage_that_made_what_they_are_of(self, staged: StagedStep) -> None:
        (last, between) = (staged.pipelined.backward[cut] for cut in (1, 0))
        assert [one.stage for one in last] == [2, 2]  # of what the second block gives, and of the factor
        assert [one.stage for one in between] == [1]  # where both are summed

    @pytest.mark.parametrize("stage", range(3))
    def test_input_and_weight_make_what_backward_makes_each_once(self, staged: StagedStep, stage: int) -> None:
        made = {}
        for work in ("backward", "input", "weight"):
            part = staged.parted.part(stage, work)
            made[work] = [value for value in part.outputs if value.role == "unreduced"]
        assert sorted(v.fqn for v in made["input"] + made["weight"]) == sorted(v.fqn for v in made["backward"])
        assert {v.fqn for v in made["backward"]} == {f"blocks.{stage}.0.weight", f"blocks.{stage}.0.bias"}
        nodes = {work: _computing(staged, stage, work) for work in ("backward", "input", "weight")}
        assert nodes["input"] | nodes["weight"] == nodes["backward"]
        assert not nodes["input"] & nodes["weight"]

    def test_what_the_stage_before_waits_for_is_the_input_part(self, staged: StagedStep) -> None:
        for stage in (1, 2):
            sent = {one.name for one in staged.pipelined.backward[stage - 1] if one.stage == stage}
            assert sent <= {value.fqn for value in staged.parted.part(stage, "input").outputs}
        assert _computing(staged, 0, "input") == set()


def _computing(staged: StagedStep, stage: int, work: str) -> set[str]:
    graph = staged.parted.part(stage, work).graph_module.graph  # type: ignore[arg-type]  # one of the literals
    return {node.name for node in graph.nodes if node.op == "call_function"}


REFUSED = {
    "Dropping": r"blocks\.1\.2 draws random numbers \(aten\..*\), in an order that the schedule would change; set its "
    r"dropout to 0, or draw in the batch",
    "Writing": r"seen is written in place in stage 0 \(aten\.add_\.Tensor\) and read in (backward of )?stage 2, too, which "
    r"may run before or behind it; put the cut where one stage has it alone",
    "Early": r"forward calls backward\(\) itself, which gives blocks\.0\.0\.\w+ a gradient before the schedule's own",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CaptureError, match=REFUSED[name]):
        staged_of(plan_of(tmp_path, name))


def test_a_cut_that_parts_nothing_names_the_plan(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "Blocks")
    assert plan.pipeline is not None
    wrong = replace(plan, pipeline=replace(plan.pipeline, cuts=("blocks.1", "blocks.0")))
    says = f'{plan.path}: [pipeline]: cut "blocks.0" stands behind "blocks.1", but the forward ends it before; write'
    with pytest.raises(StageError, match=f"^{re.escape(says)}"):
        staged_of(wrong)


def test_a_cut_within_what_is_not_traced_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "Blocks", '[[override]]\nmodule = ["blocks.1"]')
    assert plan.pipeline is not None
    inside = replace(plan, pipeline=replace(plan.pipeline, cuts=("blocks.0", "blocks.1.0")))
    says = 'cut "blocks.1.0" is inside of blocks.1, which is overridden and not traced; cut behind "blocks.1"'
    with pytest.raises(StageError, match=f"^{re.escape(f'{plan.path}: [pipeline]: {says}')}$"):
        staged_of(inside)


def test_a_cut_within_what_is_computed_again_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "Blocks", 'checkpoint = ["blocks.1"]')
    assert plan.pipeline is not None
    inside = replace(plan, pipeline=replace(plan.pipeline, cuts=("blocks.0", "blocks.1.0")))
    says = (
        f'{plan.path}: [pipeline] cut "blocks.1.0" is inside of blocks.1, which [step] checkpoint computes again in '
        'backward, as a whole and in one stage; cut behind "blocks.1", or checkpoint what is within one stage'
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(says)}$"):
        staged_of(inside)


def test_what_is_computed_again_is_of_the_stage_that_computed_it(tmp_path: Path, staged: StagedStep) -> None:
    plain, staged = staged, staged_of(plan_of(tmp_path, "Blocks", 'checkpoint = ["blocks.1"]'))
    more = _computing(staged, 1, "backward") - _computing(plain, 1, "backward")
    assert any(name.startswith("tanh") for name in more)
    assert [len(flow) for flow in staged.pipelined.forward] == [len(flow) for flow in plain.pipelined.forward]
    for stage in (0, 2):
        assert len(_computing(staged, stage, "backward")) == len(_computing(plain, stage, "backward"))


def test_clipping_over_a_stage_without_gradients_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "Frozen", 'clip_norm = 0.01\n[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }')
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual")
    with pytest.raises(CaptureError, match=r"\[step\] clip_norm is of all stages, and stage 1 has no trainable parameter; put"):
        world.versions(0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2).t(),
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.tensor([[True, False], [False, True]]),
        torch.arange(3.0).expand(4, 3),
        torch.empty(3, 0),
        torch.tensor(2.5, dtype=torch.bfloat16),
    ],
    ids=["plain", "transposed", "with gaps", "bool", "expanded", "nothing", "scalar"],
)
def test_the_wire_keeps_values_and_strides(tensor: torch.Tensor) -> None:
    bytes_ = tensor.numel() * tensor.element_size()
    said = Crossing("x", "", 0, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, bytes_)
    sent = wire(tensor, said)
    assert (sent.dtype, sent.is_contiguous()) == (torch.uint8, True)
    made = _own([said], [tensor])["x"]
    assert (made.stride(), made.dtype) == (tensor.stride(), tensor.dtype)
    assert torch.equal(made, tensor)
    assert not bytes_ or made.data_ptr() != tensor.data_ptr()


def test_another_layout_is_not_sent() -> None:
    said = Crossing("x", "a", 1, (2, 3), (3, 1), torch.float32, 24)
    with pytest.raises(
        CaptureError, match=r"^x, which stage 1 makes, was traced as \[2, 3\] with strides \[3, 1\] in torch.fl"
    ):
        wire(torch.arange(6.0).reshape(3, 2).t(), said)
    with pytest.raises(CaptureError, match=r"but when it is sent it is \[2, 3\] with strides \[3, 1\] in torch.float64$"):
        wire(torch.zeros(2, 3, dtype=torch.float64), said)


def test_bools_numbers_nothing_and_views_cross_bit_for_bit(tmp_path: Path, pools: Pools) -> None:
    plan = plan_of(tmp_path, "Mixed")
    run = PlanRun(plan, RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
    staged = run.world.staged
    assert staged is not None
    crossing = [one for flow in staged.pipelined.forward for one in flow]
    assert {torch.bool, torch.int64, torch.float32} <= {one.dtype for one in crossing}
    assert {(2, 0), (8, 2), (2, 8)} <= {one.shape for one in crossing}
    assert {(1, 8), (0, 1)} <= {one.strides for one in crossing}  # turned, expanded
    for check in ("audit", "same", "bitwise"):
        verdict = run.check(check)
        assert verdict, repr(verdict)


def test_statistics_of_a_stage_and_batches_with_gaps_in_memory_are_those_of_the_whole_step(
    tmp_path: Path, pools: Pools
) -> None:
    """Backward of a BatchNorm is given the statistics, and does not read them."""
    plan = plan_of(tmp_path, "Normed")
    assert plan.model is not None
    model = replace(plan.model, batch=f"{STAGED}:with_gaps", loss=f"{STAGED}:squared")
    run = PlanRun(replace(plan, model=model), RunSettings(tmp_path, tmp_path / "golden", tmp_path / "artifacts"), pools)
    for check in ("audit", "bitwise", "eager"):
        verdict = run.check(check)
        assert verdict.outcome == "passed", repr(verdict)
