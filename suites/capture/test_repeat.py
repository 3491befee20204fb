"""Layers traced once and repeated: the very graph of the full trace, names and storages too, or the full trace itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import repeat_models as models
from repeats import Case, assert_same, case_of
from torch import nn

from fixtures.models import hf_llama, llama, uneven
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.losses import own_loss
from pytest_fxbucket.capture.mesh import mesh_of
from pytest_fxbucket.capture.repeat.confirm import refuse_other
from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.portable import encode_module
from pytest_fxbucket.plan.load import load_plans

PLANS = Path(__file__).resolve().parents[2] / "fixtures" / "plans"
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


@pytest.mark.parametrize(
    ("args", "rest"),
    [
        ({"layers": 7, "tied": True, "dim": 40, "heads": 2, "vocab": 130}, {"reshard_after_forward": False, **MIXED}),
    ],
)
def test_llama_repeated_is_llama_traced(args: dict[str, Any], rest: dict[str, Any]) -> None:
    assert_same(Case(partial(llama.build, **args), llama.batch(0, 0), llama.loss, **rest), f"layers[0-{args['layers'] - 1}]")


def test_a_llama_of_transformers_repeated_is_itself_traced() -> None:
    pytest.importorskip("transformers")
    case = Case(partial(hf_llama.build, layers=7), hf_llama.batch(0, 0), own_loss, **MIXED)
    assert_same(case, "model.layers[0-6]")


def test_layers_of_uneven_shards_with_norms_and_biases_repeat() -> None:
    assert_same(Case(partial(uneven.build, blocks=7), uneven.batch(0, 0), uneven.loss), "blocks[0-6]")


@pytest.mark.parametrize(("n", "reshard"), [(7, True), (12, False)])
def test_any_depth_repeats(n: int, reshard: bool) -> None:
    assert_same(case_of(models.Stack, n, reshard_after_forward=reshard), f"layers[0-{n - 1}]")


@pytest.mark.parametrize(
    ("build", "repeated"),
    [
        (partial(models.Stack, make=models.Counting), "layers[0-9]"),
        (partial(models.Stack, make=models.Wasteful), "layers[0-9]"),
        (models.SharesOnce, "layers[0-9]"),
        (models.Residual, "layers[0-9]"),
        (models.first_frozen, "layers[2-9]"),
        (models.wider_inside, "layers[2-11]"),
        (models.sequential, "the root module[1-10]"),
        (models.Keyed, "layers[0-9]"),
        (models.Shares, "layers[0-9]"),
        (partial(models.Stack, make=models.OwnBackward), "layers[0-9]"),
    ],
)
def test_layers_repeat(build: Callable[[int], nn.Module], repeated: str) -> None:
    assert_same(case_of(build, 10), repeated)


@pytest.mark.parametrize("n", [15])
def test_pairs_of_layers_repeat_where_every_second_is_alike(n: int) -> None:
    assert_same(case_of(models.every_second, n), f"layers[0-{n // 2 * 2 - 1}]")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(models.Stack, make=models.Growing), "module layers.0 reads its attribute number, which is not the same"),
        (partial(models.Stack, make=models.Late), "module layers.0 reads its attribute number, which is not the same"),
        (partial(models.Stack, make=models.Literal), "is not called alike all along: a call of aten.lift_fresh"),
        (models.counts_in_config, "forward changes attribute config of module layers.0"),
        (partial(models.Stack, make=models.CountsInModule), "forward changes variable calls of repeat_models"),
        (partial(models.Stack, make=models.CountsInClass), "forward changes class attribute CountsInClass.made"),
        (models.Drops, "forward changes Python's random generator"),
        (models.Taps, "layers[0-11] is not called alike all along: "),
        (models.TapsLater, "at the last layer depends on how many layers there are"),
        (models.Stacks, "at the last layer depends on how many layers there are"),
        (models.Scales, "is not called alike all along: the layer's call at layer 8"),
        (models.Skips, "layers have different numbers of nodes or values in the trace"),
        (models.Twice, "layer 7 of layers[0-11] is not called once and in its turn"),
        (models.Backwards, "layer 11 of layers[0-11] is not called once and in its turn"),
        (models.LeavesOut, "layer 11 of layers[0-11] is not called"),
        (models.PastTheLayer, "layers[0-11] is not called alike all along: "),
        (models.Counts, "at the last layer depends on how many layers there are"),
        (models.CountsInside, "a call of aten.div.Tensor in unit 0 of layers[0-11] depends on how many layers there are"),
        (models.ByNumber, "failed: IndexError"),
        (models.tied, "parameter layers.8.up.weight is the same as layers.3.up.weight"),
        (models.tied_to_the_head, "parameter layers.8.down.bias is the same as first.bias"),
        (models.shared_module, "module layers.1.norm is the same as layers.0.norm"),
        (models.hooked, "layers[6-11] has 6 units that are alike"),
        (models.own_forward, "layers[6-11] has 6 units that are alike"),
        (models.told_by_a_variable, "a call of aten.mul.Tensor at layer 8"),
        (models.told_by_a_context, "a call of aten.mul.Tensor at layer 8"),
        (models.told_by_a_config, "a call of aten.mul.Tensor at layer 8"),
        (models.reads_its_dict, "a call of aten.mul.Tensor at layer 8"),
        (models.reads_its_vars, "a call of aten.mul.Tensor at layer 8"),
        (models.in_a_registry, "a call of aten.mul.Tensor at layer 8"),
        (models.in_a_weak_registry, "a call of aten.mul.Tensor at layer 8"),
        (models.on_a_buffer, "a call of aten.mul.Tensor at layer 8"),
        (partial(models.Stack, make=models.Mute), "at layer 8"),
        (partial(models.Stack, make=models.BackwardOnly), "backward"),
        (partial(models.Stack, make=models.HooksTensor), "backward"),
    ],
)
def test_what_is_not_alike_is_not_repeated(build: Callable[[int], nn.Module], reason: str) -> None:
    with pytest.raises(NotAlike) as refused:
        case_of(build, 12).every_layer_alike()
    assert reason in str(refused.value)


def test_what_is_not_repeated_is_traced_in_full() -> None:
    case = case_of(models.Twice, 12)
    found = case.repeated()
    assert (found.repeated, found.reason) == ("", "layer 7 of layers[0-11] is not called once and in its turn")
    refuse_other(found.traced, case.full())
    assert len(set(case.traces)) == 1


def test_few_layers_are_traced_in_full_at_once() -> None:
    case = case_of(models.Stack, 6)
    assert case.repeated().reason == "layers[0-5] has 6 units that are alike, and 11 would be traced"
    assert len(case.traces) == 1


def test_a_model_without_layers_is_traced_in_full() -> None:
    found = case_of(models.Block).repeated()
    assert found.reason == "no container holds layers that are built alike"


def test_layers_that_the_plan_treats_otherwise_are_not_alike() -> None:
    found = case_of(models.Stack, 12, checkpoint="layers.3.up").repeated()
    assert (found.repeated, found.reason) == ("layers[4-11]", "")


@pytest.mark.parametrize(
    "asked",
    [
        {"microbatches": 2, "checkpoint": "layers.*", "reshard_after_forward": False},
        {"mode": "hybrid_shard", "dp_shard": 2, "dp_replicate": 2, "microbatches": 2},
        {"dp_shard": 2, "tp": 2, "tp_plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}},
    ],
    ids=lambda asked: "-".join(map(str, asked)),
)
def test_layers_repeat_in_every_mode(asked: dict[str, Any]) -> None:
    assert_same(case_of(models.Stack, 7, **asked), "layers[0-6]")


def test_two_short_models_are_traced_however_deep_the_model() -> None:
    case = case_of(models.Stack, 40)
    assert case.repeated().repeated == "layers[0-39]"
    assert case.traces == [4 + 4 * 5, 4 + 4 * 6]


@pytest.mark.parametrize("build", [models.every_second, models.ByNumber])
def test_a_model_has_all_its_layers_and_its_own_forward_again(build: Callable[[int], nn.Module]) -> None:
    case = case_of(build, 14)
    model = case.model()
    before = [(fqn, id(module), type(module), dict(vars(module))) for fqn, module in model.named_modules()]
    on_classes = {cls: dict(vars(cls)) for cls in (models.Block, models.Windowed)}
    case.repeated(model)
    assert [(fqn, id(module), type(module), dict(vars(module))) for fqn, module in model.named_modules()] == before
    assert {cls: dict(vars(cls)) for cls in on_classes} == on_classes


def test_what_cannot_be_traced_fails_as_the_full_trace_does() -> None:
    with pytest.raises(
        CaptureError, match=r"tracing module layers\.0 failed at suites/capture/repeat_models.py:\d+ in forward"
    ):
        case_of(models.asks_a_value, 12).repeated()


def test_a_plan_asks_for_it_and_the_step_says_which_layers() -> None:
    plan = load_plans(PLANS / "uneven.toml")[0]
    assert plan.model is not None
    deep = replace(plan, model=replace(plan.model, args={"blocks": 7}))
    asked = replace(deep, step=replace(deep.step, reuse_layers=True))
    full, reusing = (capture_plan(p, mesh_of(p), 0) for p in (deep, asked))
    assert (full.reused, reusing.reused) == ("", "blocks[0-6] repeated")
    assert (reusing.inputs, reusing.outputs, reusing.parameters) == (full.inputs, full.outputs, full.parameters)
    assert encode_module(reusing.graphs["joint"]).rows == encode_module(full.graphs["joint"]).rows
