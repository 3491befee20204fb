"""Modes, tp, ep, checkpoint and microbatches that a model does not fit: one sentence that says what, where, and what to do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import capture_models
import pytest
from steps import plan_of
from test_capture_errors import line_of

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError, FxbucketError, PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.mesh import KNOWN, mesh_with


def sentence(factory: str = "residual", step: Step | None = None, **rest: Any) -> str:
    plan = replace(plan_of(factory, **rest), step=step or Step())
    with pytest.raises(FxbucketError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert isinstance(caught.value, (CaptureError, PlanError))
    assert "\n" not in str(caught.value)
    return str(caught.value)


EXPERTS = {"ep": 2, "ep_plan": parse_entries(["experts"], "test")}
FIT = {
    "tp that does not divide": (
        {"tp": 3, "tp_plan": {"layers.0": "colwise"}},
        "tp = 3 does not divide dimension 0 of parameter layers.0.weight, whose shape is (8, 8); "
        "use another tp, or leave layers.0 out of tp_plan",
    ),
    "no linear": (
        {"factory": "normalised", "tp": 2, "tp_plan": {"1": "colwise"}},
        "tp_plan makes 1 colwise, but it is a BatchNorm1d; only modules with the forward of torch.nn.Linear can be parted, "
        'others need mode = "module:callable"',
    ),
    "a prefix of linears": (
        {"tp": 2, "tp_plan": {"layers": "colwise"}},
        "tp_plan makes layers colwise, but it is a ModuleList, of which the linears are to be named: "
        '"layers.0" = "colwise", "layers.1" = "colwise", "layers.2" = "colwise"',
    ),
    "rowwise of a whole input": (
        {"factory": "two_heads", "tp": 3, "tp_plan": {"out": "rowwise"}},
        "tp_plan makes out rowwise, so its input must be a rank's part, 2 of 6 wide, but it is whole; "
        "make the linears that its input is made by colwise",
    ),
    "tied in two ways": (
        {"factory": "tied", "tp": 2, "tp_plan": {"first": "colwise", "last": "rowwise"}},
        "tp_plan parts first.weight and last.weight in two ways, but they are one tied parameter; give both one way",
    ),
    "a selector of nothing": (
        {"tp": 2, "tp_plan": {"layers.9": "colwise"}},
        'plan.toml: [parallel] tp_plan: entry "layers.9" matches nothing; "layers" has children 0..2',
    ),
    "ep that does not divide": (
        {"factory": "routed", "args": {"experts": 3, "biases": 3, "seen": 3}, **EXPERTS},
        "ep = 2 does not divide dimension 0 of parameter experts.weight, whose shape is (3, 8, 8); "
        "use another ep, or leave experts out of ep_plan",
    ),
    "experts of other rows": (
        {"factory": "routed", "args": {"biases": 1}, **EXPERTS},
        "ep_plan parts experts by the first dimension of its parameters, one row an expert, but weight has 4 rows and bias 1",
    ),
    "input of other rows": (
        {"factory": "routed", "args": {"seen": 1}, **EXPERTS},
        "ep_plan parts experts, whose parameters have 4 rows, so its input must be (experts = 4, capacity, ...), "
        "but has the shape (1, 4, 8)",
    ),
    "microbatches that do not divide": (
        {"step": Step(microbatches=3)},
        "[step] microbatches = 3 does not divide dimension 0 of a tensor of the batch, whose shape is (4, 8); "
        "use a number that does, or give the batch more rows",
    ),
    "half a mode": (
        {"mode": "capture_models:half_a_mode"},
        "mode capture_models:half_a_mode gave a value of type HalfAMode, which has no method gather; expected a Mode",
    ),
    "a mode whose gather is None": (
        {"mode": "capture_models:no_way_back"},
        "mode capture_models:no_way_back gave a value of type NoWayBack, which has no method gather; expected a Mode",
    ),
    "a mode that was not returned": (
        {"mode": "capture_models:forgotten"},
        "mode capture_models:forgotten returned None, expected a Mode",
    ),
    "a mode along nothing": (
        {"mode": "capture_models:along_dp"},
        'mode capture_models:along_dp parts parameters along "dp", but the mesh has no dimension "dp"; '
        'did you mean "dp_shard"?',
    ),
    "a group of nothing": (
        {"mode": "capture_models:group_of_dp"},
        'mode capture_models:group_of_dp: the mesh has no dimension "dp"; did you mean "dp_shard"?',
    ),
    "gathered with the padding": (
        {"factory": "uneven", "mode": "capture_models:leaves_padding"},
        "mode capture_models:leaves_padding: gather gave [8, 8] for 0.weight, whose shape is [5, 8]; cut off what part() added",
    ),
    "gathered in part": (
        {"mode": "capture_models:gathers_a_part"},
        "mode capture_models:gathers_a_part: gather gave [2, 8] for layers.0.weight, whose shape is [8, 8]; "
        "give the whole of what part() parts, alike on every rank",
    ),
    "gathered as no tensor": (
        {"mode": "capture_models:gathers_nothing"},
        "mode capture_models:gathers_nothing: gather gave a value of type NoneType for layers.0.weight, whose shape is "
        "[8, 8]; give the whole of what part() parts, alike on every rank",
    ),
    "reduced whole": (
        {"mode": "capture_models:reduces_whole"},
        "mode capture_models:reduces_whole: reduce gave [8] for the gradient of head.bias, of which part()'s shape is "
        "[2]; give the part that part() gives",
    ),
    "an embedding": (
        {"factory": "embedded", "tp": 2, "tp_plan": {"0": "colwise"}},
        "tp_plan makes 0 colwise, but it is an Embedding; only modules with the forward of torch.nn.Linear can be parted, "
        'others need mode = "module:callable"',
    ),
    "no mode": (
        {"mode": "capture_models:last_dimensions"},
        'plan.toml: [parallel] mode: module "capture_models" has no "last_dimensions"; did you mean "last_dimension"?',
    ),
}


@pytest.mark.parametrize(("plan", "said"), FIT.values(), ids=FIT.keys())
def test_what_does_not_fit_the_model_is_told_with_what_to_do(plan: dict[str, Any], said: str) -> None:
    assert sentence(**plan) == said


def test_heads_that_do_not_fit_are_told_at_the_users_own_line() -> None:
    at = line_of(capture_models.Heads.forward, "heads =")
    said = sentence("two_heads", tp=2, tp_plan={"inner": "colwise", "out": "rowwise"})
    assert said.startswith(f"tracing the root module failed at {at}: RuntimeError: shape '[4, 2, 3]' is invalid")
    assert said.endswith(
        "; under tp = 2 the output of inner (colwise) is a rank's part: let heads follow from the width, as in "
        "view(batch, sequence, -1, head_dim), and make what reads them rowwise"
    )


def test_an_error_of_the_models_own_is_not_put_down_to_tp() -> None:
    assert "under tp" not in sentence("raises_in_forward", tp=2, tp_plan={"0": "colwise"})


def test_names_that_a_mesh_may_have_are_taken_and_others_are_told() -> None:
    mesh = mesh_with({"dp_replicate": 2, "dp_shard": 4, "tp": 1})
    assert [mesh.degree(name) for name in KNOWN] == [1, 2, 4, 1, 1, 1]
    for ask in (mesh.degree, mesh.group, partial(mesh.at, 0), partial(mesh.ranks, 0)):
        with pytest.raises(CaptureError, match=r'no dimension "dp"; did you mean "dp_replicate" or "dp_shard"\?$'):
            ask("dp")
        with pytest.raises(CaptureError, match=r'no dimension "dp_shrad"; did you mean "dp_shard"\?$'):
            ask("dp_shrad")


def test_a_mode_that_raises_is_told_at_its_own_line() -> None:
    at = line_of(capture_models.raising_mode, "raise")
    assert sentence(mode="capture_models:raising_mode") == (
        f"mode capture_models:raising_mode failed at {at}: LookupError: no such mesh"
    )


def test_a_mode_that_cannot_part_a_parameter_is_told_with_the_parameter() -> None:
    at = line_of(capture_models.RaisingPart.part, "raise")
    said = sentence("uneven", mode="capture_models:raising_part")
    assert said == f"mode capture_models:raising_part of parameter 0.bias failed at {at}: ValueError: 4 ranks do not divide 5"


def test_a_mode_that_cannot_gather_is_told_with_the_module() -> None:
    at = line_of(capture_models.RaisingPart.gather, "raise")
    said = sentence(mode="capture_models:raising_part")
    assert said == f"tracing module layers.0 failed at {at}: RuntimeError: no way back"
