"""What stages say of themselves: what they receive, make, send and pass on, have and tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.pipeline import Crossing, Stage, split_stages
from suites.pipeline.running import eagerly, step_apart
from suites.pipeline.test_split import built


def names(crossing: tuple[Crossing, ...]) -> str:
    return " ".join(one.name for one in crossing)


def test_values_of_one_shape_that_skip_stages() -> None:
    said = [stage.summary for stage in built("Skips")[2]]
    assert [one.modules for one in said] == [(f"layers.{index}",) for index in range(6)]
    assert [names(one.receives) for one in said] == [
        "x",
        "addmm",
        "tanh addmm_1",
        "tanh tanh_1 addmm_2",
        "tanh tanh_1 tanh_2 addmm_3",
        "tanh tanh_1 addmm_4",
    ]
    assert [one.sends for one in said[:-1]] == [one.receives for one in said[1:]]
    assert [names(one.makes) for one in said] == ["addmm", "tanh addmm_1", "tanh_1 addmm_2", "tanh_2 addmm_3", "addmm_4", ""]
    assert [names(one.bypasses) for one in said] == ["", "", "tanh", "tanh tanh_1", "tanh tanh_1", ""]
    assert [one.flops for one in said] == [2 * 4 * 8 * 8] * 6
    tanh = said[2].receives[0]
    assert tanh == Crossing("tanh", "", 1, (4, 8), (8, 1), torch.float32, 4 * 8 * 4)
    assert said[1].receives[0].module == "layers.0"


def test_a_stage_receives_all_of_the_batch_and_passes_on_what_a_late_one_reads() -> None:
    first, second, last = (stage.summary for stage in built("Nested")[2])
    assert (names(first.receives), names(first.sends), names(first.bypasses)) == ("x labels", "x labels addmm", "labels")
    assert (names(second.sends), names(second.bypasses)) == ("x labels addmm addmm_1", "x labels")
    assert (names(last.receives), last.sends) == (names(second.sends), ())
    assert {one.stage for one in second.receives} == {0}


def test_modules_of_a_stage_begin_and_end_in_it() -> None:
    assert [stage.summary.modules for stage in built("Keywords")[2]] == [("first.linear",), (), ("second.linear",), ()]
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))
    assert [stage.summary.modules for stage in split_stages(model, ["0"], torch.randn(4, 8))] == [("0", "1"), ("2",)]


def test_the_order_does_not_depend_on_how_arguments_are_passed() -> None:
    model, batch, stages = built("Keywords")
    assert isinstance(batch, dict)
    again = split_stages(model, ["first"], dict(sorted(batch.items(), reverse=True)))
    assert names(again[0].summary.receives) == names(stages[0].summary.receives) == "x mask"


def test_a_stage_has_what_it_reads_by_every_name() -> None:
    model, _, stages = built("Shared")
    assert [(tie.fqn, tie.stages) for tie in stages.ties] == [
        ("layers.0.weight", (0, 2)),
        ("layers.0.bias", (0, 2)),
        ("scale", (0, 1, 2)),
        ("offset", (0, 1, 2)),
    ]
    assert stages.unread == ("unread",)
    whole = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for stage in stages:
        own = dict(stage.named_parameters(remove_duplicate=False)) | dict(stage.named_buffers())
        assert all(whole[fqn] is tensor for fqn, tensor in own.items())
    parts = [list(stage.state_dict()) for stage in stages]
    assert parts == [
        ["scale", "layers.0.weight", "layers.0.bias", "layers.2.weight"],
        ["scale", "layers.1.weight", "layers.1.bias", "same.weight", "same.bias"],
        ["scale", "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"],
    ]
    assert {name for part in parts for name in part} | {"unread"} == set(model.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_a_part_of_a_checkpoint_is_loaded(assign: bool) -> None:
    model, batch, stages = built("Skips")
    torch.manual_seed(7)
    other = type(model)()
    checkpoint = other.state_dict()
    for stage in stages:
        stage.load_state_dict({name: checkpoint[name] for name in stage.state_dict()}, assign=assign)
    (x,) = batch  # type: ignore[misc]
    assert stages(x).equal(other(x))


def test_a_stage_runs_in_the_mode_of_the_model_when_it_was_cut() -> None:
    model, batch, _ = built("Sequential")
    stages = split_stages(model.eval(), ["1"], batch)
    (x,) = batch  # type: ignore[misc]
    before = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    assert not any(stage.train().training for stage in stages)
    assert stages(x).equal(model(x))
    assert all(before[fqn].equal(buffer) for fqn, buffer in model.named_buffers())


def test_an_argument_that_is_passed_twice_is_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x) - y

    model, one, other = Two(), torch.randn(4, 8), torch.randn(4, 8)
    stages = split_stages(model, ["linear"], (one, one))
    assert stages(one, y=other).equal(model(one, other))


def test_it_is_printed() -> None:
    assert str(built("Nested")[2]) == (
        "stage 0: 72 parameters, 512 FLOPs, receives 2 tensors (160 B), sends 3 tensors (288 B), bypasses 1 tensor (32 B)\n"
        "stage 1: 72 parameters, 512 FLOPs, receives 3 tensors (288 B), sends 4 tensors (416 B), bypasses 2 tensors (160 B)\n"
        "stage 2: 136 parameters, 512 FLOPs, receives 4 tensors (416 B)"
    )


# These tests can fail: a split that loses a bypass, or swaps two values of one shape, is seen.


class Wrong(nn.Module):
    """A stage whose values at two places are swapped, or of which one is left as it was in another call."""

    def __init__(self, stage: Stage, change: Any) -> None:
        super().__init__()
        self.stage, self.change, self.summary = stage, change, stage.summary

    def forward(self, *received: torch.Tensor) -> Any:
        return self.change(self.stage(*received))


def swapped(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (values[1], values[0], *values[2:])


def dropped(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (torch.zeros_like(values[0]), *values[1:])


@pytest.mark.parametrize("change", [swapped, dropped])
def test_a_wrong_split_is_seen(change: Any) -> None:
    model, batch, stages = built("Skips")
    output = eagerly(model, batch)["output 0"]
    wrong = [Wrong(stage, change) if stage.summary.index == 3 else stage for stage in stages]
    for parts, same in ((wrong, False), (list(stages), True)):
        torch.manual_seed(3)
        given = step_apart(parts, batch)
        assert (given.detach().numpy().tobytes() == output[2]) is same
