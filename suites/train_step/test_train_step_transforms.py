"""Transformations of a captured step run once a trace; state that they add or remove stays paired with the graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.roles import Value
from suites.train_step.state_transforms import (
    AVERAGE,
    WEIGHT,
    State,
    averaging,
    broken,
    given,
    inputs,
    results,
    value,
    with_outputs,
    without_momentum,
)
from suites.train_step.step_twins import Twins, adamw, batch, sgd


def test_a_transform_runs_once_a_trace_and_sees_every_state_by_name() -> None:
    seen: list[list[str]] = []

    def looking(step: StepGraph, state: State) -> StepGraph:
        seen.append(list(state))
        return step

    twins = Twins(adamw, transforms=[looking])
    for i in range(6):
        twins.same(*batch(i, rows=4 if i % 2 else 3))
    assert len(seen) == twins.step.traces == 2
    assert seen[0] == [v.fqn for v in twins.step.graphs[0].inputs["joint"] if v.role == "state"]


def test_added_state_is_kept_up_to_date_and_shared_by_signatures() -> None:
    twins = Twins(sgd, transforms=[averaging])
    expected = torch.zeros(3, 8)
    for i in range(4):
        twins.same(*batch(i, rows=4 if i % 2 else 3))
        expected = (expected + twins.eager.model.state_dict()[WEIGHT]) * 0.5
    assert twins.step.traces == 2
    assert list(twins.step.state) == [AVERAGE]
    assert torch.equal(twins.step.state[AVERAGE], expected)


def test_added_state_can_be_saved_and_loaded() -> None:
    twins = Twins(sgd, transforms=[averaging])
    twins.step(*batch(0))
    twins.step.state[AVERAGE] = torch.full((3, 8), 2.0)
    twins.step(*batch(1))
    weight = twins.captured.model.state_dict()[WEIGHT]
    assert torch.equal(twins.step.state[AVERAGE], (2.0 + weight) * 0.5)
    twins.step.state.clear()
    with pytest.raises(CaptureError, match=rf"state {AVERAGE} is missing, which a transform added; load it"):
        twins.step(*batch(2))


def test_removed_state_is_gone_from_the_optimizer_for_every_signature() -> None:
    with_it, without = Twins(sgd, transforms=[without_momentum]), Twins(lambda model: sgd(model, momentum=0.0))
    for i in range(4):
        for run in (with_it.captured, without.eager):
            torch.manual_seed(i)
            run.step(*batch(i, rows=4 if i % 2 else 3))
    names = with_it.captured.facts().keys() - {name for name in with_it.captured.facts() if name.startswith("optimizers")}
    assert {n: with_it.captured.facts()[n] for n in names} == {n: without.eager.facts()[n] for n in names}
    assert not any(with_it.captured.optimizers[0].state.values())
    assert with_it.step.traces == 2


def test_a_part_of_the_state_can_be_removed_and_stays_removed() -> None:
    twins = Twins(adamw, transforms=[without_momentum])
    state = twins.captured.optimizers[0].state
    for rows in (4, 3):
        twins.step(*batch(0, rows))
        assert {key for held in state.values() for key in held} == {"step", "exp_avg_sq"}
    state.clear()
    twins.step(*batch(0))
    assert {key for held in state.values() for key in held} == {"step", "exp_avg_sq"}


def test_a_new_trace_keeps_state_that_was_added_and_what_was_removed_stays_away() -> None:
    twins = Twins(adamw, transforms=[averaging, without_momentum])
    for i in range(2):
        twins.step(*batch(i))
    average, weight = twins.step.state[AVERAGE].clone(), twins.captured.model.get_parameter(WEIGHT)
    twins.step.retrace()
    twins.step(*batch(2))
    assert twins.step.traces == 2
    assert torch.equal(twins.step.state[AVERAGE], (average + weight) * 0.5)
    assert {key for held in twins.captured.optimizers[0].state.values() for key in held} == {"step", "exp_avg_sq"}


def without_tensor(step: StepGraph, state: State) -> StepGraph:
    del state[AVERAGE]
    return step


def other_shape(step: StepGraph, state: State) -> StepGraph:
    state[AVERAGE] = torch.zeros(2)
    return step


def other_dtype(step: StepGraph, state: State) -> StepGraph:
    state[AVERAGE] = torch.zeros(3, 8, dtype=torch.float64)
    return step


def wrong_value(step: StepGraph, state: State) -> StepGraph:
    first, *rest = step.inputs["joint"]
    return given(step, [replace(first, shape=(1,)), *rest])


def wrong_result(step: StepGraph, state: State) -> StepGraph:
    return replace(step, outputs={"joint": (*step.outputs["joint"][:-1], replace(step.outputs["joint"][-1], shape=(7,)))})


def unpaired_output(step: StepGraph, state: State) -> StepGraph:
    node = results(step)[value(step.outputs["joint"], "param", WEIGHT)]
    return with_outputs(step, {**results(step), Value("state", "more", (3, 8), torch.float32): node})


def repeated(step: StepGraph, state: State) -> StepGraph:
    first, *rest = step.inputs["joint"]
    same = value(step.inputs["joint"], "state", f"{WEIGHT}.momentum_buffer")
    return given(step, [replace(first, fqn=same.fqn), *rest])


def forgotten(step: StepGraph, state: State) -> StepGraph:
    graph = step.graphs["joint"].graph
    node = inputs(graph)[0]
    node.replace_all_uses_with(inputs(graph)[1])
    graph.erase_node(node)
    kept = {v: n for v, n in results(step).items() if v.fqn != AVERAGE}
    return with_outputs(given(step, step.inputs["joint"][1:]), kept)


def no_update(step: StepGraph, state: State) -> StepGraph:
    return with_outputs(step, {v: n for v, n in results(step).items() if (v.role, v.fqn) != ("param", WEIGHT)})


def new_input(step: StepGraph, state: State) -> StepGraph:
    first, *rest = step.inputs["joint"]
    return given(step, [replace(first, role="batch"), *rest])


def of_no_module(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    return replace(step, graphs={phase: one.graph for phase, one in step.graphs.items()})  # type: ignore[arg-type]  # on purpose


def without_output(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    graph = step.graphs["joint"].graph
    graph.erase_node(graph.output_node())
    return step


def ill_formed(step: StepGraph, state: State) -> StepGraph:
    graph = step.graphs["joint"].graph
    next(iter(graph.nodes)).prepend(graph.output_node().prev)
    return step


def raising(step: StepGraph, state: State) -> StepGraph:
    raise KeyError("ema")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda step, state: given(step, step.inputs["joint"][1:]), "left a graph with 23 inputs, but described 22"),
        (
            lambda step, state: replace(step, outputs={"joint": step.outputs["joint"][:-1]}),
            "left a graph with {outputs} outputs, but described",
        ),
        (without_tensor, f"left the input state {AVERAGE} without a tensor; put its first one into state"),
        (other_shape, f"put shape (2,) and dtype torch.float32 into state for {AVERAGE}, but its input is shape (3, 8)"),
        (other_dtype, f"put shape (3, 8) and dtype torch.float64 into state for {AVERAGE}"),
        (wrong_value, f"described state {AVERAGE} as shape (1,) and dtype torch.float32, but its node among the inputs has"),
        (wrong_result, f"gives state {AVERAGE} a new value of shape (7,) and dtype torch.float32, but it is shape (3, 8)"),
        (unpaired_output, "left an output for state more, which is no input; add or remove both"),
        (repeated, f"left inputs with two of state {WEIGHT}.momentum_buffer"),
        (forgotten, f"left {AVERAGE} in state, but no input has it; delete it from state, too"),
        (no_update, f"left out the output param {WEIGHT}; only outputs of state can go"),
        (
            lambda step, state: with_outputs(step, {v: n for v, n in results(step).items() if v.role != "loss"}),
            "left out the output loss result",
        ),
        (new_input, f"added the input batch {AVERAGE}; only state can be added"),
        (ill_formed, "left a graph that is not well formed"),
        (of_no_module, "gave a value of type Graph for the joint graph; it is to be an fx.GraphModule"),
        (without_output, "left the joint graph without an output that is a list of its results"),
        (
            lambda step, state: replace(step, inputs={}),
            "left no inputs for the joint graph; the StepGraph has a tuple",
        ),
        (lambda step, state: None, "gave a value of type NoneType; it is to give the StepGraph"),
        (raising, "failed at suites/train_step/test_train_step_transforms.py:"),
    ],
)
def test_what_does_not_fit_is_told_with_the_transform_and_changes_nothing(change: Any, text: str) -> None:
    twins = Twins(sgd, transforms=[broken(change)])
    before = twins.captured.facts()
    with pytest.raises(CaptureError) as caught:
        twins.step(*batch(0))
    found = str(caught.value)
    assert found.startswith("transform broken.<locals>.broken_transform ")
    assert text.split("{outputs}")[0] in found
    assert text.split("{outputs}")[-1] in found
    assert twins.captured.facts() == before
    assert not twins.captured.optimizers[0].state
    assert twins.step.state == {}
    assert twins.step.traces == 0


ROOT, JOB = Path(__file__).resolve().parents[2], "suites.train_step.data_parallel_jobs:steps"


def test_bucketed_data_parallel_steps_train_as_eager_on_two_ranks(pools: Pools) -> None:
    results = pools.get(2).run(JOB, [None] * 2, timeout_s=60, paths=[str(ROOT)])
    assert results[0] == results[1]
    assert results[0] == {
        "replicated": {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0},
        "sharded": {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2},
    }
