"""A plan's factory runs as any Python code does, however large the model is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import built_models
import pytest
import torch
from steps import captured
from torch import nn

from pytest_fxbucket.capture import model as building
from pytest_fxbucket.capture.model import build
from pytest_fxbucket.compat.tracing import is_fake
from pytest_fxbucket.errors import CaptureError

Factory = Callable[[], nn.Module]


@pytest.mark.parametrize("most_bytes", [building.MOST_BYTES, 0], ids=["real", "without memory"])
@pytest.mark.parametrize("factory", built_models.FACTORIES, ids=lambda factory: factory.__name__)
def test_a_factory_as_people_write_it_gives_a_step(factory: Factory, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_BYTES", most_bytes)
    if most_bytes == 0 and factory in (built_models.scaled_by_a_weight, built_models.at_import):
        return _refused_or_held(factory)
    step = captured(factory.__name__, of="built_models")
    model = factory()
    assert {p.fqn: p.dtype for p in step.parameters} == {fqn: p.dtype for fqn, p in model.named_parameters()}
    return None


def _refused_or_held(factory: Factory) -> None:
    """What there is before the factory is called has its memory; what reads a weight that has none cannot be built."""
    if factory is built_models.at_import:
        assert not any(is_fake(p) for p in build(factory, {}, "f").parameters())
        return
    with pytest.raises(CaptureError, match=r"\[model\] factory f reads the value of a parameter at .*built_models.py:"):
        build(factory, {}, "f")


def test_what_lives_at_import_is_as_before_behind_a_capture() -> None:
    before = {name: (tensor, tensor.clone()) for name, tensor in built_models.AT_IMPORT.state_dict(keep_vars=True).items()}
    captured("at_import", of="built_models")
    after = built_models.AT_IMPORT.state_dict(keep_vars=True)
    assert all(after[name] is tensor and torch.equal(tensor, copy) for name, (tensor, copy) in before.items())


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


def test_a_value_that_cannot_be_read_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_BYTES", 0)
    with pytest.raises(CaptureError) as caught:
        build(built_models.reads_a_weight, {}, "mine:build")
    assert str(caught.value).startswith("[model] factory mine:build reads the value of a parameter at ")
    assert str(caught.value).endswith("make it of numbers or buffers, or give the plan a smaller model ([model] args)")
    assert Path(__file__).with_name("built_models.py").name in str(caught.value)


def test_a_failed_build_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_BYTES", 0)
    apply, swap = nn.Module._apply, torch.utils.swap_tensors
    with pytest.raises(CaptureError):
        build(built_models.reads_a_weight, {}, "f")
    assert (nn.Module._apply, torch.utils.swap_tensors) == (apply, swap)
    assert not is_fake(nn.Linear(2, 2).weight)
