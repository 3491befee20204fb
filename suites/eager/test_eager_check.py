"""What ``eager`` says where torch's own step rounds otherwise by design, cannot be had, or does not end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.eager.reasons import lacking
from pytest_fxbucket.eager.unit_calls import UnitCalls, unit_calls
from pytest_fxbucket.pipeline.captured import StagedStep
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Optimizer
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.eager.eager_net import ROOT, Run
from suites.eager.eager_net import plan_of as small_plan
from suites.eager.rounding_models import Decoded
from suites.pipeline.wrong_splits import edited, place_of


def plan_of(model: str, plan: str, tables: str, args: str = "") -> str:
    return f"""
[model]
factory = "suites.eager.rounding_models:build"
args = {{ name = "{model}"{args} }}
batch = "suites.eager.rounding_models:batch"
loss = "suites.eager.rounding_models:loss"
[bucket]
plan = {plan}
{tables}
"""


def row_of(path: str, row: str | None) -> Plan:
    (plan,) = [plan for plan in load_plans(ROOT / path) if plan.matrix_id == row]
    return plan


TWO = "[parallel]\ndp_shard = 2\n"
TP = '[parallel]\ndp_shard = 2\ntp = 2\ntp_plan = { "up" = "colwise", "down" = "rowwise" }\n'
LAYERS = '["first", "layer", "head"]'
IS_OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
LATE = f"{TWO}[step]\nmicrobatches = 2\n"
BY_DESIGN = {
    "reused_unit": (
        "Twice",
        '["first", "layer", "head"]',
        LATE,
        ", times = 2",
        "reduces what earlier microbatches gave it by itself",
    ),
    "reused_unit of a container": (
        "InLists",
        '["first", "held", "head"]',
        LATE,
        ", times = 2",
        "reduces what earlier microbatches gave it by itself",
    ),
    "rowwise_bias": ("Parted", '["up", "down"]', TP, "", "RowwiseParallel adds a bias to a part of the sum"),
    **{
        f"shared_input {model} {plan}": (model, plan, tables, "", "FSDP2 adds the gradients of the unit's reads first")
        for model, plan, tables in (
            ("Decoded", '["encoder", "layers.*"]', LATE),
            ("Learned", '["memory", "layers.*"]', TWO),
            ("InPairs", '["encoder", "layers.*"]', TWO),
            ("InPairs", '["encoder", "layers"]', TWO),
            ("GivenThrice", '["encoder", "layers.*"]', TWO),
            ("ReadByLoss", '["encoder", "layers.*"]', TWO),
        )
    },
    "fused_rnn": ("Recurrent", '["rnn", "head"]', TWO, "", "eager runs oneDNN's recurrent layer"),
}


@pytest.mark.parametrize("case", BY_DESIGN)
def test_bits_that_part_by_design_are_red_with_the_reason_and_green_once_it_is_stated(case: str, run: Run) -> None:
    model, plan, tables, args, words = BY_DESIGN[case]
    reason = case.split()[0]
    verdict = run(plan_of(model, plan, tables, args))
    assert verdict.outcome == "failed"
    assert verdict.lines[-1].startswith("by design: ")
    assert words in verdict.lines[-1]
    key = f'[eager]\nrounds_otherwise = ["{reason}"]'
    assert verdict.lines[-1].endswith(f"; {key.replace(chr(10), ' ')} holds everything else")
    stated = run(plan_of(model, plan, f"{tables}{key}\n", args))
    assert stated, stated
    assert words in stated.summary


@pytest.mark.parametrize(
    ("reads", "shares"), [((2, 2), True), ((2, 1), True), ((1, 2), False), ((1, 1, 1), False), ((2,), False)]
)
def test_three_gradients_that_two_orders_add_are_told_of_a_forward(reads: tuple[int, ...], shares: bool) -> None:
    """What the last unit reads is added first in either order."""
    model = Decoded(reads)
    plan = small_plan(plan_of("Decoded", '["encoder", "layers.*"]', TWO))
    assert unit_calls(model, plan, lambda one: one(torch.randn(2, 8))) == UnitCalls(frozenset(), shares)


def test_a_container_is_the_modules_in_it_whose_inputs_are_cast(run: Run) -> None:
    """FSDP2 makes one unit of them; a container itself is never called."""
    mixed = f'{TWO}param_dtype = "bfloat16"\nreduce_dtype = "float32"\n'
    verdicts = [
        run(plan_of("InLists", '["first", "held", "head"]', mixed, ", times = 1"), check) for check in ("audit", "eager")
    ]
    assert all(verdicts), verdicts


def test_a_reason_that_the_model_does_not_have_is_red(run: Run) -> None:
    verdict = run(plan_of("Twice", LAYERS, f'{TWO}[eager]\nrounds_otherwise = ["shared_input"]\n', ", times = 2"))
    assert verdict.lines == ('[eager] rounds_otherwise states "shared_input", but the model has no such thing; take it out',)


def test_what_torch_compile_wraps_runs_as_it_is_on_both_sides(run: Run) -> None:
    verdict = run(plan_of("CompiledPart", '["a", "b"]', TWO))
    assert verdict, verdict


def test_a_unit_that_is_called_twice_is_reduced_once_where_there_are_no_microbatches(run: Run) -> None:
    verdict = run(plan_of("Twice", LAYERS, TWO, ", times = 2"))
    assert verdict, verdict


def test_gradients_that_fsdp2_makes_in_reduce_dtype_from_torch_2_15_on_are_made_as_the_graphs_where_a_plan_says_so(
    run: Run,
) -> None:
    mixed = f'{TWO}param_dtype = "bfloat16"\nreduce_dtype = "float32"\n[step]\nmicrobatches = 2\n'
    verdict = run(plan_of("ReadTwice", '["first", "head"]', mixed))
    if IS_OLDER:
        assert verdict, verdict
    else:
        assert verdict.outcome == "failed"
        assert verdict.lines[-1].startswith("by design: FSDP2 from torch 2.15 on has autograd make and add gradients in")
    stated = run(plan_of("ReadTwice", '["first", "head"]', f'{mixed}[eager]\nrounds_otherwise = ["gradient_dtype"]\n'))
    assert stated, stated
    assert "FSDP2 from torch 2.15 on" in stated.summary


def test_a_reduce_dtype_that_is_left_out_means_another_dtype_from_torch_2_15_on(run: Run) -> None:
    verdict = run(plan_of("Twice", LAYERS, TWO + 'param_dtype = "bfloat16"\n', ", times = 1"))
    if IS_OLDER:
        assert verdict, verdict
    else:
        assert verdict.outcome == "failed"
        assert verdict.lines[-1].startswith("reduce_dtype is left out: a plan reduces in the gradient's dtype then, FSDP2 from")


def test_what_torch_cannot_step_is_skipped_with_what_torch_says(run: Run) -> None:
    verdict = run(plan_of("ReadByParent", '["a", "b"]', TWO))
    assert verdict.outcome == "skipped"
    assert verdict.summary.startswith("torch's FSDP2 cannot step this model: RuntimeError: ")


def test_a_step_that_raises_once_it_has_stepped_is_no_skip(run: Run) -> None:
    verdict = run(plan_of("RaisesLater", '["a", "b"]', TWO))
    assert verdict.outcome == "failed"
    assert verdict.lines == ("torch's FSDP2 stepped, and then raised ValueError: tired",)


def test_a_parameter_without_a_gradient_is_none_for_ddp_either(run: Run) -> None:
    verdict = run(plan_of("Unused", '["a", "b"]', '[parallel]\nmode = "replicate"\ndp_replicate = 2\n'))
    assert verdict, verdict
    assert "torch's DistributedDataParallel" in verdict.summary


def test_of_what_may_be_idle_zeros_are_right_where_torch_has_no_gradient_and_an_update_that_it_leaves_out_is_red(
    run: Run,
) -> None:
    """Weights decay in the graph; the last expert of each layer is idle, that of the first may be."""
    idle = row_of("fixtures/plans/override.toml", "idle")
    assert idle.model is not None
    may_be = replace(idle.model, may_be_idle=parse_entries(["layers.0.moe.experts.3"], "test"))
    verdict = run(replace(idle, model=may_be, optimizer=(Optimizer("torch.optim:AdamW", {"lr": 0.01, "weight_decay": 0.1}),)))
    assert verdict.outcome == "failed"
    assert verdict.lines[:2] == tuple(f"torch's own step has no gradient layers.1.moe.experts.3.w{i}.weight" for i in (1, 2))
    assert verdict.lines[2].startswith("step 0, rank 0: parameter layers.0.moe.experts.3.w1.weight")


UNREAD = '["a", "b", "rest"]'
STAGES = f'{TWO}pp = 2\n[pipeline]\ncuts = ["a"]\n[step]\nmicrobatches = 2\n[optimizer]\nfactory = "torch.optim:AdamW"\n'


def test_what_no_stage_reads_stays_as_it_is_and_what_a_stage_reads_is_in_its_graph(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StagedStep.of_rank

    def constant(at: int, graph: fx.Graph) -> None:
        place = graph.find_nodes(op="placeholder")[at]
        with graph.inserting_before(next(iter(place.users))):
            made = graph.call_function(torch.ops.aten.full.default, ([8], 0.5))
        made.meta = dict(place.meta)
        place.replace_all_uses_with(made)
        graph.erase_node(place)

    def without_factor(staged: StagedStep, mesh: Mesh, rank: int) -> StepGraph:
        step = right(staged, mesh, rank)
        for phase in [phase for phase, values in step.inputs.items() if any(one.fqn == "b.factor" for one in values)]:
            at = place_of(step.inputs[phase], "b.factor")
            step = edited(step, phase, partial(constant, at), lambda values, at=at: values[:at] + values[at + 1 :])
        return step

    monkeypatch.setattr(StagedStep, "of_rank", without_factor)
    verdict = run(plan_of("Unread", UNREAD, STAGES, ", late = true"), anew=True)
    assert verdict.lines[0] == "the graph has no buffer b.factor"
    assert verdict.lines[1].startswith("step 0, rank 0: buffer steps: 1 of 1 elements differ")


def test_an_eager_step_that_does_not_end_says_which(run: Run) -> None:
    verdict = run(plan_of("Waits", '["a", "b"]', f"{TWO}[run]\ntimeout_s = 5\n"))
    assert verdict.outcome == "failed"
    assert 'at "eager step 1 of 3"' in verdict.summary


LACKING = {
    "[graph]": ("fixtures/plans/traced.toml", None, "a [graph] comes without the model that it was traced from"),
    "a mode of one's own": ("fixtures/plans/mode.toml", None, "torch has no eager step for mode fixtures.modes:predivided"),
    "copies parted over tp": ("fixtures/plans/tp.toml", "replicate", "takes no parameters that are parted over tp"),
    "all-reduced first": ("fixtures/plans/hybrid.toml", "replicate_first", "FSDP2 scatters first"),
    "clipped over two meshes": ("fixtures/plans/whole.toml", "clipped", "clip_grad_norm_ takes no parameters of two meshes"),
    "another sub-graph": ("fixtures/plans/override.toml", "subgraph", "gives the graph something else than the model's own"),
}


@pytest.fixture(scope="module")
def any_world() -> PlanOnMesh:
    plan = small_plan()
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual")


@pytest.mark.parametrize("case", LACKING)
def test_what_torch_has_no_step_for_is_named(case: str, any_world: PlanOnMesh) -> None:
    path, row, words = LACKING[case]
    said = lacking(row_of(path, row), any_world.step(0), any_world.resolution, ())
    assert said is not None
    assert words in said


TWO_DTYPES = f"""
[model]
factory = "suites.checks.effects_models:of_two_dtypes"
batch = "suites.checks.bitwise_models:batch"
loss = "suites.checks.bitwise_models:loss"
[bucket]
plan = ["scale+up+down"]
{TWO}
"""
LACKING_ONCE_CAPTURED = {
    "a unit of two dtypes": (small_plan(TWO_DTYPES), "entry scale+up+down has bfloat16 and float32"),
    "sums that round": (row_of("fixtures/plans/duplicates.toml", "added"), "add_before_reducing"),
}


@pytest.mark.parametrize("case", LACKING_ONCE_CAPTURED)
def test_what_torch_has_no_step_for_is_skipped_by_name(case: str, run: Run) -> None:
    plan, words = LACKING_ONCE_CAPTURED[case]
    verdict = run(plan)
    assert verdict.outcome == "skipped"
    assert words in verdict.summary


def odd(name: str, mesh: str) -> str:
    of = "suites.eager.odd_models"
    model = f'[model]\nfactory = "{of}:{name}"\nbatch = "{of}:batch"\nloss = "{of}:loss"\n[parallel]\n{mesh}\n'
    return f'{model}[bucket]\nplan = []\nunplanned = "root"\n'


@pytest.mark.parametrize("name", ["HandsOn", "Named"])
def test_buffers_that_hand_values_on_and_names_of_wrappers_are_torchs(name: str, run: Run) -> None:
    verdict = run(odd(name, "dp_shard = 2"))
    assert verdict, verdict


def test_a_hook_that_fsdp2_drops_is_named_and_ddp_runs_it(run: Run) -> None:
    verdict = run(odd("Hooked", "dp_shard = 2"))
    assert verdict.outcome == "failed"
    assert [line for line in verdict.lines if line.startswith("parameter module.weight has a hook of register_hook")]
    assert run(odd("Hooked", 'mode = "replicate"\ndp_replicate = 2'))
