"""A module's part of a graph computes by itself, bit for bit, what it computes where it stands, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.graph_view import GraphView
from suites.graph.view_models import Net, Twice, Wrapper, cached_aot, captured, dynamo, ones
from suites.graph.view_running import RANKS, check, drawn


@pytest.mark.parametrize("fqn", ["layers.0", "layers.1.attention", "layers.0.mlp", "layers.1.norm", "layers", "wrapped", ""])
@pytest.mark.parametrize("phase", [0, 1])
def test_modules_of_aot_autograd_s_graphs_run_by_themselves(fqn: str, phase: int) -> None:
    gm = cached_aot()[phase]
    sub = GraphView(gm)[fqn].subgraph()
    check(gm, sub, as_module=True)
    assert sub.between == ()


@pytest.mark.parametrize(
    ("fqn", "direction"),
    [
        ("layers.1", "forward"),
        ("layers.1", "backward"),
        ("layers.1", None),
        ("layers.1.attention.wq", None),
        ("tok_embeddings", "backward"),
        ("layers", "forward"),
    ],
)
def test_modules_of_a_captured_step_run_by_themselves(fqn: str, direction: str | None) -> None:
    step = captured()
    view = GraphView.of_step(step)
    sub = view[fqn].subgraph(direction)
    check(step.graphs["joint"], sub)
    # between forward and backward of a layer lies the loss
    assert bool(sub.between) == (direction is None)
    if direction == "forward":
        parameters = [node for node in sub.inputs if node.op == "placeholder"]
        assert {p.node for p in view[fqn].parameters} <= set(parameters)


def test_a_layer_s_graph_has_no_other_inputs_than_the_layer() -> None:
    step = captured()
    layer = GraphView.of_step(step)["layers.1"]
    sub = layer.subgraph("forward")
    computed = [node for node in sub.inputs if node.op != "placeholder"]
    assert len(computed) == 1
    backward = layer.subgraph("backward")
    made_later = [node for node in backward.inputs if node.meta.get("autograd_backward")]
    assert len(made_later) == 1


def test_what_stands_between_a_module_s_nodes_is_left_out_if_another_s_and_taken_in_if_its_caller_s() -> None:
    gm = dynamo(Twice(), ones())
    view = GraphView(gm)
    sub = view.shared.subgraph()
    check(gm, sub, as_module=True)
    assert [node.name for node in sub.between] == [node.name for node in view.other.nodes()]
    forward = cached_aot()[0]
    mlp = GraphView(forward)["layers.0.mlp"].subgraph()
    assert "aten.relu.default" in {str(node.target) for node in mlp.nodes}


def test_modules_of_a_graph_from_dynamo_run_with_their_attributes() -> None:
    gm = torch.export.export(Wrapper(Net()), (ones(),)).module()
    sub = GraphView(gm)["layers.1"].subgraph()
    assert [node.op for node in sub.inputs] == ["call_function"]
    check(gm, sub, as_module=True)
    assert len(sub.graph.find_nodes(op="get_attr")) == 8


def given() -> tuple[Program, fx.Node]:
    """A program with an input of six numbers."""
    p = Program(RANKS)
    return p, p.given("x", 6)


def call(p: Program, module: str, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A node of ``module``, or of none."""
    p.module = module
    node = p.call(target, *args)
    if not module:
        del node.meta["nn_module_stack"]
    return node


def test_an_input_that_is_written_in_place_is_written_in_the_part_too() -> None:
    p, x = given()
    doubled = call(p, "", aten.mul.Tensor, x, 2.0)
    written = call(p, "a", aten.add_.Tensor, doubled, 1.0)
    gm = p.returns(call(p, "a", aten.neg.default, written))
    sub = GraphView(gm).a.subgraph()
    check(gm, sub)
    value = drawn(0, torch.empty(6))
    before = value.clone()
    sub.graph_module(value)
    assert torch.equal(value, before + 1)


def written_by_others_between_two_reads(p: Program, x: fx.Node) -> list[fx.Node]:
    made = call(p, "a", aten.neg.default, x)
    call(p, "b", aten.add_.Tensor, made, 1.0)
    return [call(p, "a", aten.mul.Tensor, made, 2.0)]


def read_by_others_before_a_later_write(p: Program, x: fx.Node) -> list[fx.Node]:
    made = call(p, "a", aten.neg.default, x)
    other = call(p, "b", aten.mul.Tensor, made, 2.0)
    return [call(p, "a", aten.add_.Tensor, made, 1.0), other]


def inputs_that_share_what_is_written(p: Program, x: fx.Node) -> list[fx.Node]:
    made = call(p, "", aten.neg.default, x)
    seen = call(p, "", aten.view.default, made, [2, 3])
    return [call(p, "a", aten.add_.Tensor, made, 1.0), call(p, "a", aten.neg.default, seen)]


def written_through_another_s_view(p: Program, x: fx.Node) -> list[fx.Node]:
    made = call(p, "a", aten.neg.default, x)
    seen = call(p, "b", aten.view.default, made, [2, 3])
    return [made, call(p, "a", aten.add_.Tensor, seen, 1.0)]


REFUSED: dict[Callable[[Program, fx.Node], list[fx.Node]], str] = {
    written_by_others_between_two_reads: "add__tensor writes in place what neg_default and mul_tensor share, and stands",
    read_by_others_before_a_later_write: "mul_tensor reads what add__tensor writes in place later",
    inputs_that_share_what_is_written: (
        "its inputs and nodes share memory (neg_default and view_default), and add__tensor writes in place there"
    ),
    written_through_another_s_view: (
        "its inputs and nodes share memory (view_default and neg_default), and add__tensor writes in place there"
    ),
}


@pytest.mark.parametrize("build", REFUSED)
def test_a_part_that_would_compute_something_else_is_refused(build: Callable[[Program, fx.Node], list[fx.Node]]) -> None:
    p, x = given()
    gm = p.returns(*build(p, x))
    with pytest.raises(GraphError, match="^" + re.escape(f"a has no graph of its own: {REFUSED[build]}")):
        GraphView(gm).a.subgraph()


def test_parts_of_results_go_with_the_operator_and_waits_with_the_launch() -> None:
    """Nobody names one part of ``split`` and the wait; another module takes the other part."""
    p, x = given()
    split = call(p, "a", aten.split.Tensor, x, 3)
    first, second = call(p, "", getitem, split, 0), call(p, "b", getitem, split, 1)
    launch = call(p, "a", c10d.all_gather_into_tensor.default, first, RANKS, "0")
    wait = call(p, "", c10d.wait_tensor.default, launch)
    gm = p.returns(call(p, "b", aten.neg.default, second), wait)
    a, b = GraphView(gm).a.subgraph(), GraphView(gm).b.subgraph()
    check(gm, a)
    check(gm, b)
    assert (a.outputs, b.inputs) == ((second, wait), (second,))


def test_a_module_in_which_nothing_ran_has_no_graph() -> None:
    with pytest.raises(GraphError, match=r"no node ran in wrapped.embed in backward, so there is no graph of it"):
        GraphView(cached_aot()[0]).embed.subgraph("backward")


def test_random_graphs_of_modules_and_writes_run_by_themselves_or_are_refused() -> None:
    ran = refused = 0
    for seed in range(60):
        gm = random_program(seed)
        for module in GraphView(gm).children.values():
            try:
                sub = module.subgraph()
            except GraphError:
                refused += 1
                continue
            if sub.outputs:
                check(gm, sub)
                ran += 1
    assert ran > 60
    assert refused > 10


def random_program(seed: int) -> fx.GraphModule:
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    p = Program(RANKS)
    made = p.shards("xy", 6)
    for _ in range(12):
        module, source = ("a", "b", "c", "")[pick(4)], made[pick(len(made))]
        operator = pick(6)
        if operator == 0:
            made.append(call(p, module, aten.add_.Tensor, source, made[pick(len(made))]))
        elif operator == 1:
            made.append(call(p, module, aten.view.default, source, [-1]))
        else:
            made.append(call(p, module, aten.sub.Tensor, source, made[pick(len(made))]))
    return p.returns(*made[-3:])


def test_a_graph_that_make_fx_traced_runs_by_itself() -> None:
    net = Twice()
    gm = make_fx(net)(ones())
    assert GraphView(gm).subgraph().inputs == tuple(gm.graph.find_nodes(op="placeholder"))
    check(gm, GraphView(gm).subgraph(), as_module=True)
