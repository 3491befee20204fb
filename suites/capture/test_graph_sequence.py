"""A step whose graphs hand values to each other: run as one, held together by names, checked graph by graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.given_graphs import TracedStep, take_step
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_bucket import Transform
from pytest_fxbucket.step.graph_sequence import as_one
from pytest_fxbucket.step.mesh import shard_mesh
from suites.capture.placed_graphs import init_device_mesh, parted, parted_step, traced

ROOT = Path(__file__).resolve().parents[2]
(PLAN,) = load_plans(ROOT / "fixtures" / "plans" / "split.toml")


def step_of(graphs: Any = None, **given: Any) -> TracedStep:
    """The parted step, on one rank."""
    with fake_world(0, 1):
        return parted_step(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), graphs, **given)


def taken(step: TracedStep) -> Any:
    return take_step(step, PLAN, shard_mesh(1), 0)


def test_names_and_positions_say_what_is_handed_on() -> None:
    step = step_of()
    said = {phase: [*zip(step.roles[phase]["inputs"], step.fqns[phase]["inputs"], strict=True)] for phase in step.graphs}
    assert said["forward"] == [("whole", "a"), ("whole", "b"), ("batch", "x")]
    assert [role for role, _ in said["backward"]] == ["crossing", "crossing"]
    assert said["backward"] == [("crossing", name) for name in step.fqns["forward"]["outputs"][1:]]
    assert said["reduce"] == [("unreduced", "a"), ("unreduced", "b")]
    assert {phase: len(tensors) for phase, tensors in step.inputs.items()} == dict(unshard=2, forward=1, backward=0, reduce=0)


def test_graphs_run_in_their_order_as_one_on_what_each_hands_on() -> None:
    step = as_one(taken(step_of()))
    a, b, x = step.example_inputs["joint"]
    loss, grad_a, grad_b = step.graphs["joint"](a, b, x)
    assert loss.equal((a * 2 * b * x).sum())
    assert grad_a.equal((b * x + 1) * 2)
    assert grad_b.equal((a * 2 * x + 2) * 3)
    assert [(value.role, value.fqn) for value in (*step.inputs["joint"], *step.outputs["joint"])] == [
        *(("param", "a"), ("param", "b"), ("batch", "x")),
        *(("loss", ""), ("grad", "a"), ("grad", "b")),
    ]


def test_constants_whose_names_differ_in_a_dot_stay_two() -> None:
    graphs = parted()
    forward = graphs["forward"]
    forward.kept = torch.nn.Module()
    forward.kept.register_buffer("one", torch.tensor(3.0))
    forward.register_buffer("kept_one", torch.tensor(5.0))
    loss = forward.graph.output_node().args[0][0]
    with forward.graph.inserting_before(forward.graph.output_node()):
        for name in ("kept.one", "kept_one"):
            held = forward.graph.get_attr(name)
            held.meta["val"] = torch.tensor(0.0)
            loss = forward.graph.call_function(torch.ops.aten.mul.Tensor, (loss, held))
            loss.meta["val"] = torch.tensor(0.0)
    forward.graph.output_node().args = ([loss, *forward.graph.output_node().args[0][1:]],)
    forward.recompile()
    step = as_one(taken(step_of(graphs)))
    a, b, x = step.example_inputs["joint"]
    assert step.graphs["joint"](a, b, x)[0].equal((a * 2 * b * x).sum() * 3 * 5)


def test_graphs_come_in_their_order_whatever_order_they_are_given_in() -> None:
    step = taken(step_of(dict(reversed(parted().items()))))
    assert list(step.graphs) == ["unshard", "forward", "backward", "reduce"]


def test_backward_may_be_two_graphs_and_one_may_hand_to_both() -> None:
    graphs = parted()
    graphs["input"] = traced(lambda bx, ax: [bx + ax], (4,), (4,))
    graphs["weight"] = traced(lambda both, ax: [both * 2, ax + 2], (4,), (4,))
    del graphs["backward"]
    saved = ["bx", "ax"]
    step = step_of(
        graphs,
        inputs={"input": saved, "weight": ["both", "ax"]},
        outputs={"forward": ["loss", *saved], "input": ["both"]},
    )
    one = as_one(taken(step))
    a, b, x = one.example_inputs["joint"]
    _, grad_a, _ = one.graphs["joint"](a, b, x)
    assert grad_a.equal((b * x + a * 2 * x) * 2 * 2)


def test_a_transformation_of_one_graph_is_refused() -> None:
    plan = replace(PLAN, transform=(Transform("merge_duplicates"),))
    with pytest.raises(CaptureError, match=r"hand values to each other, and \[\[transform\]\] merge_duplicates changes a step"):
        take_step(step_of(), plan, shard_mesh(1), 0)


def renamed(phase: str, side: str, names: list[str]) -> Any:
    return lambda step: replace(step, fqns={**step.fqns, phase: {**step.fqns[phase], side: names}})


REFUSED = {
    "a value that nobody gives": (
        renamed("reduce", "inputs", ["a", "bb"]),
        "the reduce graph takes the unreduced gradient of 'bb', which no graph before it gives; did you mean \"b\"?",
    ),
    "a value of another size": (
        lambda step: replace(step, graphs={**step.graphs, "reduce": traced(lambda a, b: [a[:4], b], (8,), (4,))}),
        "the reduce graph takes the unreduced gradient of 'a' as [8] in float32, but the backward graph gives [4] in float32",
    ),
    "a value given twice": (
        renamed("unshard", "outputs", ["a", "a"]),
        "the whole parameter 'a' is given twice, by unshard and by unshard; add up in one graph what is one value, and give "
        "others names of their own",
    ),
    "a gradient that nobody reduces": (
        lambda step: replace(
            renamed("reduce", "outputs", ["a", "a"])(renamed("reduce", "inputs", ["a", "x"])(step)),
            roles={**step.roles, "reduce": {"inputs": ["unreduced", "batch"], "outputs": ["grad", "value"]}},
            inputs={**step.inputs, "reduce": [torch.ones(4)]},
        ),
        "the backward graph gives the unreduced gradient of 'b', which no graph reduces; let the reduce graph take it, or give "
        "it the role grad",
    ),
    "tensors for what is handed": (
        lambda step: replace(step, inputs={**step.inputs, "reduce": [torch.ones(4)]}),
        "reduce graph takes 0 inputs beside 2 that it is handed, but 1 tensors are given",
    ),
    "no forward": (
        lambda step: replace(step, graphs={"unshard": step.graphs["unshard"], "reduce": step.graphs["reduce"]}),
        "graphs are to be joint, or forward and backward (or input and weight) with unshard before and reduce behind them "
        "where they are split off, but the TracedStep has unshard, reduce",
    ),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_together_is_refused_in_one_sentence(change: Any, said: str) -> None:
    with pytest.raises(CaptureError) as caught:
        taken(change(step_of()))
    assert str(caught.value) == f"[graph] factory fixtures.models.split:step: {said}"


def test_a_pass_that_hands_on_the_wrong_parameter_is_red_on_ranks_too(checked: Callable[..., Verdict]) -> None:
    swapped = {"pass_name": "suites.capture.placed_graphs:biases_swapped"}
    same, bitwise = checked(PLAN, "same", **swapped), checked(PLAN, "bitwise", **swapped)
    assert (same.outcome, bitwise.outcome) == ("failed", "failed")
    assert any("gradient of layers.0.bias" in line or "loss" in line for line in bitwise.lines)
    assert any("forward_" in line for line in bitwise.lines), bitwise.lines


def test_audit_says_what_it_leaves_out_and_holds_the_rest(checked: Callable[..., Verdict]) -> None:
    verdict = checked(replace(PLAN, parallel=replace(PLAN.parallel, reshard_after_forward=True)), "audit")
    assert verdict.outcome == "passed"
    assert "(left out, since whoever calls the graphs decides it: overlap with compute and reshard_after_forward)" in (
        verdict.summary
    )
    unmerged = checked(PLAN, "audit", pass_name="suites.capture.placed_graphs:left_as_it_is")
    entries, whats = {line.split(":")[0] for line in unmerged.lines}, ("forward all_gather", "backward reduce_scatter")
    assert entries >= {f"entry layers.{i}, {what}" for what in whats for i in range(3)}
