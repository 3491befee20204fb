"""Batches as people have them: the model gets what its forward takes, the loss the rest; two meanings are an error."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.capture.batch import batch_of, own_loss, split_of
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Model
from pytest_fxbucket.plan.table_rules import Path
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.capture.steps import plan_of


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("x", x)


class Two(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return (x, mask)


class Named(nn.Module):
    def forward(self, x: Any, **others: Any) -> Any:
        return (x, others)


class Several(nn.Module):
    def forward(self, *given: Any) -> Any:
        return given


def parted(model: nn.Module, batch: Any, *inputs: Path) -> tuple[Any, Any]:
    """What the model and what the loss gets."""
    split = split_of(model, batch, inputs)
    return split.call(model, batch), split.loss(lambda output, targets: targets, None, batch)


@pytest.mark.parametrize(
    ("model", "batch", "gets"),
    [
        (Two(), (1, 2), (1, 2)),
        (Two(), [1], (1, None)),
        (Two(), {"mask": 2, "x": 1}, (1, 2)),
        (Named(), {"x": 1, "labels": 2}, (1, {"labels": 2})),
        (Several(), (1, 2, 3), (1, 2, 3)),
        (Two(), ((1, 2), 3), ((1, 2), 3)),
        (Two(), ({"x": 1}, 3), ({"x": 1}, 3)),
        (One(), ({"x": 1},), ("x", {"x": 1})),
    ],
)
def test_a_batch_that_forward_takes_whole_is_the_models_and_the_losss(model: nn.Module, batch: Any, gets: Any) -> None:
    assert parted(model, batch) == (gets, batch)


@pytest.mark.parametrize(
    ("model", "batch", "gets", "targets"),
    [
        (One(), (1, 2), ("x", 1), 2),
        (One(), (1, 2, 3), ("x", 1), (2, 3)),
        (Two(), (1, 2, {"labels": 3}), (1, 2), {"labels": 3}),
        (Two(), {"x": 1, "labels": 2}, (1, None), {"labels": 2}),
        (One(), ((1, 2), 3), ("x", (1, 2)), 3),
        (One(), ({"image": 1}, 3), ("x", {"image": 1}), 3),
    ],
)
def test_what_forward_does_not_take_are_targets(model: nn.Module, batch: Any, gets: Any, targets: Any) -> None:
    assert parted(model, batch) == (gets, targets)


@pytest.mark.parametrize(
    ("model", "batch", "inputs", "gets", "targets"),
    [
        (Two(), (1, 2), [(0,)], (1, None), 2),
        (Two(), (1, 2, 3), [(2,), (0,)], (3, 1), 2),
        (Two(), {"x": 1, "mask": 2}, [("x",)], (1, None), {"mask": 2}),
        (Named(), {"x": 1, "a": 2, "b": 3}, [("x",), ("b",)], (1, {"b": 3}), {"a": 2}),
        (Two(), ({"x": 1, "mask": 2}, 3), [(0, "*")], (1, 2), 3),
        (Two(), ((1, 2), 3), [(0, "*")], (1, 2), 3),
        (Two(), ({"x": 1, "y": 2}, 3), [(0, "x")], (1, None), ({"y": 2}, 3)),
        (Two(), (1, 2), [("*",)], (1, 2), (1, 2)),
        (Two(), ({"input": 1}, 3), [(0, "*")], (1, None), 3),
        (Two(), ({"mask": 2, "input": 1}, 3), [(0, "*")], (1, 2), 3),
    ],
)
def test_inputs_say_outright_what_the_model_gets(
    model: nn.Module, batch: Any, inputs: list[Path], gets: Any, targets: Any
) -> None:
    assert parted(model, batch, *inputs) == (gets, targets)


def test_a_loss_that_asks_for_the_batch_gets_all_of_it() -> None:
    split = split_of(One(), (1, 2))
    assert split.loss(lambda output, batch: batch, None, (1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("model", "batch", "inputs", "says"),
    [
        (One(), ({"x": 1}, 2), [], 'write inputs = [0] in [model] for the one, inputs = ["0.*"] for the other'),
        (One(), ((1,), 2), [], "[model] batch gave tuple and 1 more, and One.forward could take the first itself or what is"),
        (One(), {"image": 1, "y": 2}, [], "[model] batch gave image, y, and One.forward takes x; name keys as it does"),
        (One(), {"x": 1}, [("y",)], '[model] inputs: "y" is not in the batch, which has x there'),
        (One(), (1, 2), [(2,)], '[model] inputs: "2" is not in the batch, which has 0, 1 there'),
        (Two(), ({"x": 1}, {"x": 2}), [(0, "x"), (1, "x")], '[model] inputs gives "x" twice; a model takes a name once'),
        (One(), (1,), [(0, "x")], '[model] inputs: "0.x" is not in the batch, which has nothing in it there'),
    ],
)
def test_what_can_be_meant_in_two_ways_or_in_none_names_the_key_to_write(
    model: nn.Module, batch: Any, inputs: list[Path], says: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        split_of(model, batch, inputs)
    assert says in str(caught.value)


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass
class Fields:
    x: Tensor


def test_mappings_at_any_depth_are_dicts_and_a_lone_tensor_is_a_batch() -> None:
    x = torch.ones(1)
    assert batch_of(UserDict(a=[UserDict(b=x)])) == {"a": [{"b": x}]}
    assert batch_of(Pair(x, UserDict())) == Pair(x, {})
    (alone,) = batch_of(x)
    assert alone is x


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((Fields(torch.ones(1)),), "a Fields, whose tensors could be no inputs of the graph; give tuples, lists and dicts"),
        ({"x": torch.ones(1).numpy()}, "a ndarray, where a tensor is expected; make one with torch.as_tensor"),
    ],
)
def test_tensors_that_would_be_baked_in_are_refused(given: Any, says: str) -> None:
    with pytest.raises(CaptureError) as caught:
        batch_of(given)
    assert says in str(caught.value)


@dataclass
class Output:
    loss: Tensor


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "output", [LOSS, {"loss": LOSS, "logits": 1}, UserDict(loss=LOSS), Output(LOSS), (LOSS, torch.ones(2))]
)
def test_a_loss_is_found_in_what_models_give(output: Any) -> None:
    assert own_loss(output, None) is LOSS


def step(form: str, loss: str | None = "loss_of_labels", **rest: Any) -> StepGraph:
    return capture_plan(split_plan(form, loss, **rest), shard_mesh(4), 0)


def split_plan(form: str, loss: str | None = None, inputs: tuple[Path, ...] = (), microbatches: int = 1, **args: Any) -> Plan:
    model = Model("split_models:build", f"split_models:{form}", args, f"split_models:{loss}" if loss else None, inputs=inputs)
    plan = replace(plan_of("residual"), model=model)
    return replace(plan, step=replace(plan.step, microbatches=microbatches))


def operators(step: StepGraph) -> list[str]:
    return [str(node.target) for node in step.graphs["joint"].graph.nodes if node.op == "call_function"]


def test_every_form_of_one_batch_is_the_same_step() -> None:
    first = operators(step("pair", microbatches=2))
    for form, loss, inputs in [
        ("names", "loss_of_named_labels", ()),
        ("nested", "loss_of_labels", ((0, "*"),)),
        ("swapped", "loss_of_labels", ((1,),)),
        ("pair", "loss_of_batch", ()),
    ]:
        assert operators(step(form, loss, inputs=inputs, microbatches=2)) == first, form


@pytest.mark.parametrize("gives", ["dict", "tuple", "dataclass"])
def test_a_model_that_makes_its_own_loss_needs_none(gives: str) -> None:
    assert operators(step("pair", None, gives=gives)) == operators(step("pair", None, gives="loss"))


@pytest.mark.parametrize(
    ("form", "loss", "args", "says"),
    [
        (
            "pair",
            None,
            {},
            "the model does not take a part of the batch, and there is no [model] loss to read it; name a callable",
        ),
        ("names", None, {}, "the model does not take labels of the batch, and there is no [model] loss to read it"),
        (
            "pair",
            "loss_of_labels",
            {"gives": "loss"},
            "; Losing.forward took all 2 items of the batch, as x, labels; [model] in",
        ),
        (
            "inputs_alone",
            None,
            {"gives": "dataclass"},
            "the model's output.loss is None; give the batch what it makes a loss of",
        ),
        ("inputs_alone", None, {"gives": "losses"}, "the model's output is a dict of first, second, and no loss in it; name a"),
    ],
)
def test_a_loss_that_nothing_makes_is_said_with_the_way_out(form: str, loss: str | None, args: Any, says: str) -> None:
    with pytest.raises(CaptureError) as caught:
        step(form, loss, **args)
    assert says in str(caught.value)


def test_tensors_with_gaps_in_memory_are_copied_without_and_others_stay() -> None:
    wide, images = torch.arange(12.0).reshape(2, 6), torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    found = batch_of({"part": wide[:, :5], "same": wide[:1].expand(3, 6), "turned": wide.t(), "images": images})
    assert found["part"].equal(wide[:, :5])
    assert [found[name].is_contiguous() for name in ("part", "same")] == [True, True]
    assert found["turned"].data_ptr() == wide.data_ptr()
    assert found["images"] is images
