"""A plan's factory runs as any Python code does, however large the model is; test_odd of the zoo has those that are small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_fxbucket.capture import model as building
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.model import build
from pytest_fxbucket.compat.tracing import is_fake
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan_on_mesh import mesh_of
from suites.zoo import odd_forwards, odd_layers, odd_parameters
from suites.zoo.shelf import ZooModel
from suites.zoo.visit import plans_of

NAMES = ("to_bfloat16", "double", "trunc_normal", "to_empty", "module_dict")
MODELS = [
    *(getattr(odd_layers.SHELF, name) for name in NAMES),
    *(odd_parameters.SHELF.tied, odd_parameters.SHELF.deepcopied, odd_forwards.SHELF.drop_path),
]
AT_IMPORT, READS = odd_layers.SHELF.built_at_import, odd_layers.SHELF.reads_value_in_init


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_factory_as_people_write_it_gives_a_step_without_memory(model: ZooModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans_of(model)["fp32"]
    monkeypatch.setattr(building, "MOST_BYTES", 0)
    step = capture_plan(plan, mesh_of(plan), 0)
    assert {p.fqn: p.dtype for p in step.parameters} == {fqn: p.dtype for fqn, p in model.build().named_parameters()}


def test_what_lives_at_import_has_its_memory_and_is_as_before_behind_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: (tensor, tensor.clone()) for name, tensor in AT_IMPORT.build().state_dict(keep_vars=True).items()}
    plan = plans_of(AT_IMPORT)["fp32"]
    capture_plan(plan, mesh_of(plan), 0)
    after = AT_IMPORT.build().state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in before.items())
    monkeypatch.setattr(building, "MOST_BYTES", 0)
    assert not any(is_fake(p) for p in build(AT_IMPORT.build, {}, "f").parameters())


def test_parameters_beyond_the_limit_have_no_memory_and_ties_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_BYTES", 300)

    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[2].weight = model[1].weight
        model.register_buffer("rows", torch.arange(3))
        return model

    model = build(factory, {}, "f")
    assert [is_fake(p) for p in model.parameters()] == [False, True]
    assert model[2].weight is model[1].weight
    assert model.get_buffer("rows").tolist() == [0, 1, 2]


def test_a_value_that_cannot_be_read_is_told_with_what_to_do_and_torch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_BYTES", 0)
    apply, swap = nn.Module._apply, torch.utils.swap_tensors
    with pytest.raises(CaptureError) as caught:
        build(READS.build, {}, "mine:build")
    assert str(caught.value).startswith(
        "[model] factory mine:build reads the value of a parameter at suites/zoo/odd_layers.py:"
    )
    assert str(caught.value).endswith("make it of numbers or buffers, or give the plan a smaller model ([model] args)")
    assert (nn.Module._apply, torch.utils.swap_tensors) == (apply, swap)
    assert not is_fake(nn.Linear(2, 2).weight)
