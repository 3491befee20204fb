"""The same module tree, whoever traced the graph, whatever wraps the model and whatever its variable is called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.graph_view import GraphView
from pytest_fxbucket.passes import manual_overlap_bucketing
from suites.graph.view_models import (
    Attention,
    Net,
    Twice,
    Wrapper,
    annotated,
    cached_aot,
    captured,
    checkpointed,
    dynamo,
    ones,
)

ATTENTIONS = ["layers.0.attention", "layers.1.attention"]
MAP_KEY = "layers.1.mlp.a-b"


def exported(model: nn.Module, **options: Any) -> fx.GraphModule:
    return torch.export.export(model, (ones(),), **options).graph_module


TRACES: dict[str, Callable[[], fx.GraphModule]] = {
    "dynamo": lambda: dynamo(Net(), ones()),
    "a wrapped model": lambda: dynamo(Wrapper(Net()), ones()),
    "a model wrapped twice, compiled within": lambda: dynamo(Wrapper(Wrapper(torch.compile(Net()))), ones()),
    "a checkpointed layer": lambda: dynamo(checkpointed(Net()), ones()),
    "an argument": lambda: dynamo(lambda model, x: model(x), Net(), ones()),
    "an item of a dict": lambda: dynamo(lambda models, x: models["net"](x), {"net": Net()}, ones()),
    "a partial": lambda: dynamo(functools.partial(lambda model, x: model(x), Net()), ones()),
    "AOTAutograd, forward": lambda: cached_aot()[0],
    "AOTAutograd, backward": lambda: cached_aot()[1],
    "torch.export": lambda: exported(Net()),
    "torch.export, strict": lambda: exported(Net(), strict=True),
    "torch.export, unlifted": lambda: torch.export.export(Net(), (ones(),)).module(),
    "symbolic_trace": lambda: fx.symbolic_trace(Net()),
}


@pytest.mark.parametrize("case", TRACES)
def test_a_module_has_the_same_name_class_and_parameters_however_it_was_traced(case: str) -> None:
    gm = TRACES[case]()
    view = GraphView(gm)
    assert [view[fqn].class_name for fqn in (*ATTENTIONS, "layers.1", MAP_KEY)] == ["Attention", "Attention", "Block", "Linear"]
    assert view.layers[0].attention == view["layers.0.attention"]
    assert [
        found.fqn[-len(fqn) :] for found, fqn in zip(view.find("layers.*.attention"), ATTENTIONS, strict=True)
    ] == ATTENTIONS
    assert view["layers.1.attention.wq"].nodes()
    assert set(view.layers.nodes()) == {node for layer in view.layers for node in layer.nodes()}
    if case != "AOTAutograd, backward":  # it is given what forward computed from weights, and few of them
        assert [p.bytes for p in view["layers.0.attention"].parameters] == [64, 64]
        assert len(view.parameters) == 2 + 2 * 8
        assert view.bytes == 4 * sum(p.numel() for p in Net().parameters())


def test_directions_of_the_two_graphs_of_aot_autograd_are_told_apart() -> None:
    forward, backward = map(GraphView, cached_aot())
    assert {direction for direction, _ in forward.counts} == {"forward"}
    layer = backward["layers.0"]
    assert len(layer.nodes("backward")) == sum(n for (d, _), n in layer.counts.items() if d == "backward") > 20
    assert [child.name for child in backward.layers] == ["0", "1"]  # although backward comes to layer 1 first


def test_an_exported_program_s_own_table_names_the_parameters() -> None:
    program = torch.export.export(Net(), (ones(),))
    view = GraphView(program.graph_module, parameters=program.graph_signature.inputs_to_parameters)
    assert [p.fqn for p in view[MAP_KEY].parameters] == [f"{MAP_KEY}.weight", f"{MAP_KEY}.bias"]


def test_annotations_name_modules() -> None:
    view = GraphView(annotated())
    assert [str(node.target) for node in view["layers.0.attention"].nodes()] == ["aten.mm.default", "aten.tanh.default"]
    assert [str(node.target) for node in view.head.nodes()] == ["aten.sum.default"]


def test_a_function_of_the_user_s_names_modules() -> None:
    gm = dynamo(Net(), ones())
    view = GraphView(gm, lambda node: [("", Net), (f"mine.{node.op}", Attention)])
    assert {node.op for node in view["mine.call_method"].nodes()} == {"call_method"}
    assert (view.class_name, view.mine.call_method.class_name) == ("Net", "Attention")


def test_two_models_in_one_graph_are_not_taken_for_one() -> None:
    view = GraphView(dynamo(lambda a, b, x: a(x) + b(x), Attention(), Attention(), ones()))
    assert sorted(view.children) == ["a", "b"]
    assert [len(view[name].wq.nodes()) for name in ("a", "b")] == [1, 1]
    assert [p.fqn for p in view.b.parameters] == ["b.wq.weight", "b.wo.weight"]


def test_what_a_module_calls_is_in_it_and_in_the_called_module() -> None:
    gm = fx.Graph()
    x = gm.placeholder("x")
    node = gm.call_function(torch.ops.aten.neg.default, (x,))
    node.meta["nn_module_stack"] = {"": ("", Net), "a": ("a", Net), "k": ("shared.k", Attention)}
    gm.output(node)
    view = GraphView(gm)
    assert view.a.nodes() == view.shared.k.nodes() == view.nodes() == [node]
    assert view.a.nodes(own=True) == []
    assert view.shared.k.nodes(own=True) == [node]


def test_both_calls_of_a_module_are_its_nodes() -> None:
    view = GraphView(dynamo(Twice(), ones()))
    assert len(view.shared.wq.nodes()) == 2
    assert len(view.other.nodes()) == 1


@pytest.mark.parametrize("with_roles", [True, False])
def test_a_captured_step_has_every_module_with_its_collectives_and_shards(with_roles: bool) -> None:
    step = captured()
    view = GraphView.of_step(step) if with_roles else GraphView(step.graphs["joint"])
    attention = view["layers.1.attention"]
    assert attention.class_name == "Attention"
    found = {key: n for key, n in attention.counts.items() if key[1] != "compute"}
    assert found == {
        ("forward", "wait"): 4,
        ("forward", "all_gather"): 4,
        ("backward", "wait"): 8,
        ("backward", "all_gather"): 4,
        ("backward", "reduce_scatter"): 4,
    }
    shards = {p.fqn: p for p in step.parameters if p.fqn.startswith("layers.1.attention.")}
    assert [p.shape for p in attention.parameters] == [p.shard_shape for p in shards.values()]
    assert len(view.parameters) == len(step.parameters)
    if with_roles:
        assert [p.fqn for p in attention.parameters] == list(shards)
        names = [name for name in step.modules if name and "." not in name]
        assert list(view.children) == names


def test_a_merged_launch_is_in_every_module_of_its_entry() -> None:
    step = captured()
    gm = copy.deepcopy(step.graphs["joint"])
    with fake_world(0, 4):
        manual_overlap_bucketing(gm, ["tok_embeddings", "layers.0", ["norm", "output"]])
    view = GraphView.of_step(step, graph_module=gm)
    gathers = [view[name].nodes("forward", "all_gather") for name in ("layers.0", "norm", "output")]
    assert [len(found) for found in gathers] == [1, 1, 1]
    assert gathers[1] == gathers[2] != gathers[0]
    # without roles, what a bucket brings is that of the modules that read it
    assert view["layers.0"].bytes == GraphView.of_step(step)["layers.0"].bytes == GraphView(gm)["layers.0"].bytes
