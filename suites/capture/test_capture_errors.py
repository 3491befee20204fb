"""What cannot be captured: one sentence that leads a person to their own line, module or key, and says what to do."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import CaptureError, FxbucketError, PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema_model import Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.mesh import GROUPED, mesh_with
from suites.capture import capture_models as models
from suites.capture import own_modes
from suites.capture.steps import at, plan_of


def sentence(factory: str = "residual", step: Step | None = None, **rest: Any) -> str:
    plan = replace(plan_of(factory, **rest), step=step or Step())
    with pytest.raises(FxbucketError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert isinstance(caught.value, (CaptureError, PlanError))
    assert "\n" not in str(caught.value)
    return str(caught.value)


FACTORY, LOSS, MODE = "[model] factory capture_models:", "[model] loss capture_models:", "mode own_modes:"
ASKS = "it asks for the value of a tensor (item(), bool(), tolist(), numpy())"
OVERRIDDEN = 'or leave it out of the step; [[override]] module = ["1"] calls it as it is when the step runs'
EXPERTS = {"ep": 2, "ep_plan": parse_entries(["experts"], "test")}
HEADS = {"factory": "Heads", "tp": 2, "tp_plan": {"inner": "colwise", "out": "rowwise"}}
HALF = {"param_dtype": "bfloat16"}
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "a factory that raises": (
        {"factory": "raises"},
        f"{FACTORY}raises failed at {at(models.raises, 'raise')}: ValueError: no such width",
    ),
    "an argument too much": ({"args": {"depth": 3}}, f"{FACTORY}residual failed: TypeError ... argument 'depth'"),
    "no module": ({"factory": "no_module"}, f"{FACTORY}no_module gave a value of type int, expected a torch.nn.Module"),
    "a forward that raises": (
        {"factory": "behind loses"},
        f"tracing module 1 failed at {at(models.loses, 'raise')}: KeyError: 'lost'",
    ),
    "an error in torch's own module": (
        {"factory": "wrong_width"},
        "tracing module 1 failed: RuntimeError: a and b must have same reduction dim ... ",
    ),
    "an error after a caught one": ({"factory": "Catches"}, "tracing the root module failed ... ValueError: and then this"),
    "a forward that asks for a value": (
        {"factory": "behind asks_a_value"},
        f"tracing module 1 failed at {at(models.asks_a_value, 'return')}: {ASKS}, which does not exist while tracing; "
        f"keep it a tensor (torch.where instead of if), {OVERRIDDEN}",
    ),
    "numpy": (
        {"factory": "behind leaves_torch"},
        f"tracing module 1 failed at {at(models.leaves_torch, 'return')}: {ASKS} ... {OVERRIDDEN}",
    ),
    "a shape that depends on values": (
        {"factory": "behind selects"},
        f"tracing module 1 failed at {at(models.selects, 'return')}: the shape that aten.nonzero.default gives "
        f"depends on values ... {OVERRIDDEN}",
    ),
    "a new buffer": (
        {"factory": "behind adds_a_buffer"},
        "buffer 1.late is new in forward, so it is no input of the step; register it in __init__",
    ),
    "a parameter without dimensions in a mode of one's own": (
        {"factory": "Scalar", "mode": "own_modes:LastDimension"},
        f"parameter scale has no dimension, and {MODE}LastDimension may not expect that; give it the shape (1,)",
    ),
    "a batch that is none": (
        {"batch": "a_number"},
        "[model] batch capture_models:a_number gave a value of type int, expected a tuple or a dict of inputs",
    ),
    "a batch that raises": (
        {"batch": "raising_batch"},
        f"[model] batch capture_models:raising_batch failed at {at(models.raising_batch, 'raise')}: OSError: no data here",
    ),
    "batches of other shapes": (
        {"batch": "growing_batch"},
        "[model] batch capture_models:growing_batch gave [0] (4, 8) torch.float32 for rank 0, step 0, but "
        "[0] (7, 8) torch.float32 for rank 3, step 1; only the values of its tensors may change, since one graph serves all",
    ),
    "a number that changes with the step": (
        {"batch": "numbered_batch"},
        "[model] batch capture_models:numbered_batch gave ['step'] 0 for rank 0, step 0, but ['step'] 1 for rank 3, step 1"
        " ... ",
    ),
    "a loss of a vector": (
        {"loss": "vector_loss"},
        f"the loss must be a scalar tensor, but {LOSS}vector_loss gave a tensor of shape (8,); take its mean() or sum()",
    ),
    "a loss of a number": (
        {"loss": "number_loss"},
        f"the loss must be a scalar tensor, but {LOSS}number_loss gave a value of type float; "
        "return a tensor without dimensions",
    ),
    "a loss without parameters": (
        {"loss": "loss_without_parameters"},
        "the loss does not depend on any trainable parameter, so there is no step to check",
    ),
    "a loss that raises": (
        {"loss": "raising_loss"},
        f"tracing the loss failed at {at(models.raising_loss, 'raise')}: IndexError: no labels",
    ),
    "two dtypes within a unit": (
        {"factory": "FloatsBetween", **HALF},
        "module layers.1.linear gives aten.addmm.default tensors of bfloat16 and float32, which torch refuses to run ... "
        "cast one to the dtype of the other, as with x.to(weight.dtype) ... ",
    ),
    "a norm of two dtypes": ({"factory": "norms_in_float32", **HALF}, "module ... , which torch refuses to run ... "),
    "a scatter of two dtypes": ({"factory": "behind scatters", **HALF}, "module ... , which torch refuses to run ... "),
    "tp that does not divide": (
        {"tp": 3, "tp_plan": {"layers.0": "colwise"}},
        "tp = 3 does not divide dimension 0 of parameter layers.0.weight, whose shape is (8, 8); "
        "use another tp, or leave layers.0 out of tp_plan",
    ),
    "a prefix of linears": (
        {"tp": 2, "tp_plan": {"layers": "colwise"}},
        "tp_plan makes layers colwise, but it is a ModuleList, of which the linears are to be named: "
        '"layers.0" = "colwise", "layers.1" = "colwise", "layers.2" = "colwise"',
    ),
    "rowwise of a whole input": (
        {"factory": "Heads", "tp": 3, "tp_plan": {"out": "rowwise"}},
        "tp_plan makes out rowwise, so its input must be a rank's part, 2 of 6 wide, but it is whole; "
        "make the linears that its input is made by colwise",
    ),
    "tied in two ways": (
        {"factory": "Tied", "tp": 2, "tp_plan": {"first": "colwise", "last": "rowwise"}},
        "tp_plan parts first.weight and last.weight in two ways, but they are one tied parameter; give both one way",
    ),
    "a selector of nothing": (
        {"tp": 2, "tp_plan": {"layers.9": "colwise"}},
        'plan.toml: [parallel] tp_plan: entry "layers.9" matches nothing; "layers" has children 0..2',
    ),
    "ep that does not divide": (
        {"factory": "Routed", "args": {"experts": 3, "biases": 3, "seen": 3}, **EXPERTS},
        "ep = 2 does not divide dimension 0 of parameter experts.weight, whose shape is (3, 8, 8); "
        "use another ep, or leave experts out of ep_plan",
    ),
    "experts of other rows": (
        {"factory": "Routed", "args": {"biases": 1}, **EXPERTS},
        "ep_plan parts experts by the first dimension of its parameters, one row an expert, but weight has 4 rows and bias 1",
    ),
    "a buffer of experts": (
        {"factory": "Routed", "args": {"noted": True}, **EXPERTS},
        "ep_plan parts experts by the first dimension of its parameters, one row an expert, and its buffer scales has 4 rows, "
        "too, of which each rank has all; make it a parameter with requires_grad=False",
    ),
    "experts that are not called": (
        {"factory": "RoutedByMethod", **EXPERTS},
        "ep_plan parts experts, whose tokens travel where it is called, and experts.weight is read elsewhere, where a rank has "
        "some of its experts alone; call the module itself, and read its parameters in its forward",
    ),
    "experts that are read behind their call": (
        {"factory": "RoutedAndPenalised", **EXPERTS},
        "ep_plan parts experts, whose tokens travel where it is called, and experts.weight is read ... in its forward",
    ),
    "experts that are given more than tokens": (
        {"factory": "RoutedWithWeights", **EXPERTS},
        "ep_plan parts experts, which is called with 2 arguments; it must be given its tokens alone, (experts = 4, capacity, "
        "...): let the module around it send tokens to places of experts",
    ),
    "input of other rows": (
        {"factory": "Routed", "args": {"seen": 1}, **EXPERTS},
        "ep_plan parts experts, whose parameters have 4 rows, so its input must be (experts = 4, capacity, ...), "
        "but has the shape (1, 4, 8)",
    ),
    "microbatches that do not divide": (
        {"step": Step(microbatches=3)},
        "[step] microbatches = 3 does not divide dimension 0 of a tensor of the batch, whose shape is (4, 8); "
        "use a number that does, or give the batch more rows",
    ),
    "half a mode": (
        {"mode": "own_modes:HalfAMode"},
        f"{MODE}HalfAMode gave a value of type HalfAMode, which has no method gather; expected a Mode",
    ),
    "a mode whose gather is None": (
        {"mode": "own_modes:NoWayBack"},
        f"{MODE}NoWayBack gave a value of type NoWayBack, which has no method gather; expected a Mode",
    ),
    "a mode that was not returned": (
        {"mode": "own_modes:forgotten"},
        f"{MODE}forgotten returned None, expected a Mode",
    ),
    "a mode along nothing": (
        {"mode": "own_modes:AlongDp"},
        f'{MODE}AlongDp parts parameters along "dp", but the mesh has no dimension "dp"; did you mean "dp_shard"?',
    ),
    "a group of nothing": (
        {"mode": "own_modes:GroupOfDp"},
        f'{MODE}GroupOfDp: the mesh has no dimension "dp"; did you mean "dp_shard"?',
    ),
    "gathered with the padding": (
        {"factory": "uneven", "mode": "own_modes:LeavesPadding"},
        f"{MODE}LeavesPadding: gather gave [8, 8] for 0.weight, whose shape is [5, 8]; cut off what part() added",
    ),
    "gathered in part": (
        {"mode": "own_modes:GathersAPart"},
        f"{MODE}GathersAPart: gather gave [2, 8] for layers.0.weight, whose shape is [8, 8]; "
        "give the whole of what part() parts, alike on every rank",
    ),
    "gathered as no tensor": (
        {"mode": "own_modes:GathersNothing"},
        f"{MODE}GathersNothing: gather gave a value of type NoneType for layers.0.weight, whose shape is "
        "[8, 8]; give the whole of what part() parts, alike on every rank",
    ),
    "reduced whole": (
        {"mode": "own_modes:ReducesWhole"},
        f"{MODE}ReducesWhole: reduce gave [8] for the gradient of head.bias, of which part()'s shape is "
        "[2]; give the part that part() gives",
    ),
    "an embedding": (
        {"factory": "embedded", "tp": 2, "tp_plan": {"0": "colwise"}},
        "tp_plan makes 0 colwise, but it is an Embedding; only modules with the forward of torch.nn.Linear can be parted, "
        'others need mode = "module:callable"',
    ),
    "no mode": (
        {"mode": "own_modes:LastDimensions"},
        'plan.toml: [parallel] mode: module "own_modes" has no "LastDimensions"; did you mean "LastDimension"?',
    ),
    "heads that do not fit": (
        HEADS,
        f"tracing the root module failed at {at(models.Heads.forward, 'heads =')}: RuntimeError: shape '[4, 2, 3]' is invalid"
        " ... ; under tp = 2 the output of inner (colwise) is a rank's part: let heads follow from the width, as in "
        "view(batch, sequence, -1, head_dim), and make what reads them rowwise",
    ),
    "a part of the output that reaches the loss": (
        {"factory": "attention", "tp": 2, "tp_plan": {"1.linear": "colwise"}},
        "under tp = 2 the model's output has the shape (4, 4), and (4, 8) without: a rank's part reaches the loss ... "
        "1.linear, colwise in tp_plan, ... ",
    ),
    "two styles for one linear": (
        {"factory": "attention", "tp": 2, "tp_plan": {"1.linear": "colwise", "1.*": "rowwise"}},
        "plan.toml ... 1.linear is colwise and rowwise by two of its selectors; let one of them name it",
    ),
    "a checkpoint of nothing": (
        {"factory": "attention", "step": Step(checkpoint=parse_entries(["1.outer"], "test"))},
        'plan.toml ... checkpoint: entry "1.outer" matches nothing ... ',
    ),
    "a mode that raises": (
        {"mode": "own_modes:raising_mode"},
        f"{MODE}raising_mode failed at {at(own_modes.raising_mode, 'raise')}: LookupError: no such mesh",
    ),
    "a mode that cannot part": (
        {"factory": "uneven", "mode": "own_modes:RaisingPart"},
        f"{MODE}RaisingPart of parameter 0.bias failed at {at(own_modes.RaisingPart.part, 'raise')}: "
        "ValueError: 4 ranks do not divide 5",
    ),
    "a mode that cannot gather": (
        {"mode": "own_modes:RaisingPart"},
        f"tracing module layers.0 failed at {at(own_modes.RaisingPart.gather, 'raise')}: RuntimeError: no way back",
    ),
    **{
        f"no such {what}": (
            {what: "residul"},
            f'plan.toml: [model] {what}: module "capture_models" has no "residul"; did you mean "residual"?',
        )
        for what in ("factory", "batch", "loss")
    },
}
"""By case what is asked and what is said; `` ... `` stands for anything."""


def test_experts_may_compute_again_in_backward_what_their_forward_computed() -> None:
    plan = plan_of("RoutedTwice", **EXPERTS)
    (graph,) = capture_plan(plan, mesh_of(plan), 0).graphs.values()
    assert (
        sum("all_to_all" in str(node.target) for node in graph.graph.nodes) == 3
    )  # there and back; no gradient goes to the batch


@pytest.mark.parametrize(("plan", "said"), SAID.values(), ids=SAID.keys())
def test_what_cannot_be_captured_is_told_with_what_to_do(plan: dict[str, Any], said: str) -> None:
    found = sentence(**plan)
    first, *parts = said.split(" ... ")
    assert found.startswith(first)
    assert found.endswith(parts[-1]) if parts else found == said
    assert all(part in found for part in parts)


def test_an_error_of_the_models_own_is_not_put_down_to_tp() -> None:
    assert "under tp" not in sentence("behind loses", tp=2, tp_plan={"0": "colwise"})


def test_torchs_logs_print_no_traceback_beside_the_sentence(caplog: pytest.LogCaptureFixture) -> None:
    heard = logging.getLogger("torch.__trace")
    heard.addHandler(caplog.handler)  # as pytest does with loggers that do not propagate
    try:
        sentence("wrong_width")
    finally:
        heard.removeHandler(caplog.handler)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING or r.name == heard.name] == []
    assert not heard.disabled


def test_a_loss_left_out_that_the_output_does_not_have_is_told() -> None:
    plan = plan_of("residual")
    assert plan.model is not None
    with pytest.raises(CaptureError) as caught:
        capture_plan(replace(plan, model=replace(plan.model, loss=None)), mesh_of(plan), 0)
    assert str(caught.value) == (
        "the model's output is a tensor of shape (4, 8); name a [model] loss that makes a scalar of it"
    )


def test_a_process_group_that_is_up_already_is_told_and_left_alone() -> None:
    with fake_world(0, 2):
        assert sentence().startswith("a default process group is up in this process")
        assert torch.distributed.get_world_size() == 2


def test_a_norm_with_float32_weights_may_be_given_bfloat16() -> None:
    plan = plan_of("behind HalfNorm")
    assert capture_plan(plan, mesh_of(plan), 0).parameters


def test_the_ranks_of_a_pipeline_are_a_group_of_the_mesh() -> None:
    mesh = mesh_with({"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 1})
    assert (mesh.degree("pp"), mesh.ranks(1, "pp"), mesh.groups(3)) == (2, (1, 3), {"mesh_pp": (1, 3), "mesh_dp_shard": (2, 3)})


def test_names_that_a_mesh_may_have_are_taken_and_others_are_told() -> None:
    mesh = mesh_with({"dp_replicate": 2, "dp_shard": 4, "tp": 1})
    assert [mesh.degree(name) for name in GROUPED] == [1, 2, 2, 4, 4, 1, 1, 1, 1]
    for ask in (mesh.degree, mesh.group, partial(mesh.at, 0), partial(mesh.ranks, 0)):
        with pytest.raises(CaptureError, match=r'no dimension "dp"; did you mean "dp_replicate" or "dp_shard"\?$'):
            ask("dp")
        with pytest.raises(CaptureError, match=r'no dimension "dp_shrad"; did you mean "dp_shard"\?$'):
            ask("dp_shrad")
