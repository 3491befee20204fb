"""A module's part of a graph computes by itself, bit for bit, what it computes where it stands, or is refused."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from view_models import Net, Twice, Wrapper, cached_aot, captured, dynamo, ones
from view_running import RANKS, check, drawn

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph_view import GraphView

aten, c10d = torch.ops.aten, c10d_functional()


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
    # between forward and backward of one layer lie other layers and the loss
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


class Program:
    """A graph of operators, each of the module it is made for."""

    def __init__(self, *inputs: str) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.nodes = {name: self._with_value(self.graph.placeholder(name), torch.empty) for name in inputs}

    def _with_value(self, node: fx.Node, make: object) -> fx.Node:
        with self.mode:
            node.meta["val"] = torch.empty(6) if node.op == "placeholder" else make()
        return node

    def call(self, module: str, target: object, *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        if module:
            node.meta["nn_module_stack"] = {module: (module, nn.Module)}
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        return self._with_value(node, lambda: target(*values))

    def returns(self, *nodes: fx.Node) -> fx.GraphModule:
        self.graph.output(nodes)
        return fx.GraphModule(nn.Module(), self.graph)


def test_an_input_that_is_written_in_place_is_written_in_the_part_too() -> None:
    p = Program("x")
    doubled = p.call("", aten.mul.Tensor, p.nodes["x"], 2.0)
    written = p.call("a", aten.add_.Tensor, doubled, 1.0)
    gm = p.returns(p.call("a", aten.neg.default, written))
    sub = GraphView(gm).a.subgraph()
    check(gm, sub)
    value = drawn(0, torch.empty(6))
    before = value.clone()
    sub.graph_module(value)
    assert torch.equal(value, before + 1)


def test_a_write_by_others_between_two_reads_is_refused() -> None:
    p = Program("x")
    made = p.call("a", aten.neg.default, p.nodes["x"])
    p.call("b", aten.add_.Tensor, made, 1.0)
    gm = p.returns(p.call("a", aten.mul.Tensor, made, 2.0))
    with pytest.raises(
        GraphError,
        match=r"^a has no graph of its own: add__tensor writes in place what neg_default and mul_tensor share, and stands",
    ):
        GraphView(gm).a.subgraph()


def test_a_read_by_others_before_a_later_write_is_refused() -> None:
    p = Program("x")
    made = p.call("a", aten.neg.default, p.nodes["x"])
    other = p.call("b", aten.mul.Tensor, made, 2.0)
    gm = p.returns(p.call("a", aten.add_.Tensor, made, 1.0), other)
    with pytest.raises(
        GraphError, match=r"^a has no graph of its own: mul_tensor reads what add__tensor writes in place later"
    ):
        GraphView(gm).a.subgraph()


def test_two_inputs_that_share_memory_which_is_written_are_refused() -> None:
    p = Program("x")
    made = p.call("", aten.neg.default, p.nodes["x"])
    seen = p.call("", aten.view.default, made, [2, 3])
    written = p.call("a", aten.add_.Tensor, made, 1.0)
    gm = p.returns(written, p.call("a", aten.neg.default, seen))
    with pytest.raises(
        GraphError,
        match="its inputs and nodes share memory \(neg_default and view_default\), and add__tensor writes in place there",
    ):
        GraphView(gm).a.subgraph()


def test_a_write_through_another_s_view_of_what_the_module_made_is_refused() -> None:
    p = Program("x")
    made = p.call("a", aten.neg.default, p.nodes["x"])
    seen = p.call("b", aten.view.default, made, [2, 3])
    gm = p.returns(made, p.call("a", aten.add_.Tensor, seen, 1.0))
    with pytest.raises(
        GraphError, match=r"share memory \(view_default and neg_default\), and add__tensor writes in place there"
    ):
        GraphView(gm).a.subgraph()


def test_parts_of_results_go_with_the_operator_and_waits_with_the_launch() -> None:
    """Nobody names one part of ``split`` and the wait; another module takes the other part."""
    p = Program("x")
    split = p.call("a", aten.split.Tensor, p.nodes["x"], 3)
    first, second = p.call("", getitem, split, 0), p.call("b", getitem, split, 1)
    launch = p.call("a", c10d.all_gather_into_tensor.default, first, RANKS, "0")
    wait = p.call("", c10d.wait_tensor.default, launch)
    gm = p.returns(p.call("b", aten.neg.default, second), wait)
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

    p = Program("x", "y")
    made = list(p.nodes.values())
    for _ in range(12):
        module, source = ("a", "b", "c", "")[pick(4)], made[pick(len(made))]
        operator = pick(6)
        if operator == 0:
            made.append(p.call(module, aten.add_.Tensor, source, made[pick(len(made))]))
        elif operator == 1:
            made.append(p.call(module, aten.view.default, source, [-1]))
        else:
            made.append(p.call(module, aten.sub.Tensor, source, made[pick(len(made))]))
    return p.returns(*made[-3:])


def test_a_graph_that_make_fx_traced_runs_by_itself() -> None:
    net = Twice()
    gm = make_fx(net)(ones())
    assert GraphView(gm).subgraph().inputs == tuple(gm.graph.find_nodes(op="placeholder"))
    check(gm, GraphView(gm).subgraph(), as_module=True)
