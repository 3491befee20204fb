"""What Python does with any object works on a view: copies, pickles, large and deep trees."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import fx, nn

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph_view import GraphView
from suites.graph.view_models import cached_aot, captured


def test_a_copy_is_a_view_of_the_same_graph() -> None:
    view = GraphView(cached_aot()[0])
    twin = copy.copy(view)
    assert twin is not view
    assert (twin, hash(twin), repr(twin)) == (view, hash(view), repr(view))
    assert twin.layers[0].nodes() == view["layers.0"].nodes()
    assert view != GraphView(cached_aot()[0])


def test_a_deep_copy_is_a_view_of_a_deep_copy_of_the_graph() -> None:
    gm = cached_aot()[0]
    view = GraphView(gm)
    held = {"gm": gm, "view": view, "layer": view.layers[1]}
    twin = copy.deepcopy(held)
    assert twin["view"].graph is twin["gm"].graph is not gm.graph
    assert twin["layer"] == twin["view"].layers[1]
    assert repr(twin["view"]) == repr(view)
    own = set(twin["gm"].graph.nodes)
    assert set(twin["layer"].nodes()) < own
    assert {p.node for p in twin["layer"].parameters} < own
    assert [n.name for n in twin["layer"].nodes()] == [n.name for n in view.layers[1].nodes()]


def test_a_pickle_carries_the_tree_and_the_names_of_nodes_and_is_bound_to_a_graph_again() -> None:
    gm = captured().graphs["joint"]
    view = GraphView.of_step(captured())
    layer = pickle.loads(pickle.dumps(view["layers.1"]))
    original = view["layers.1"]
    assert repr(layer) == repr(original)
    assert (layer.fqn, layer.bytes, layer.counts) == (original.fqn, original.bytes, original.counts)
    assert [p.fqn for p in layer.parameters] == [p.fqn for p in original.parameters]
    names = layer.node_names("backward", "reduce_scatter")
    assert names == original.node_names("backward", "reduce_scatter")
    with pytest.raises(GraphError, match=r"was pickled has names of nodes and no graph; give it one with bound_to"):
        layer.nodes()
    bound = layer.bound_to(gm)
    assert bound.nodes() == original.nodes()
    assert [p.node for p in bound.parameters] == [p.node for p in original.parameters]
    assert bound.attention.subgraph("forward").inputs == original.attention.subgraph("forward").inputs
    with pytest.raises(GraphError, match=r"the graph has no node .* and \d+ more, which was there"):
        layer.bound_to(cached_aot()[0])


def test_a_view_that_is_not_there_yet_has_no_modules() -> None:
    """What copy and pickle modules of others ask of an empty object."""
    empty = GraphView.__new__(GraphView)
    assert not hasattr(empty, "layers")
    assert not hasattr(empty, "__array__")
    assert not hasattr(GraphView(cached_aot()[0]), "__array__")


def deep(depth: int) -> fx.Graph:
    """Modules nested in each other, a node in each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    stack: dict[str, tuple[str, type]] = {}
    for i in range(depth):
        fqn = ".".join(["inner"] * (i + 1))
        stack = {**stack, fqn: (fqn, nn.Sequential)}
        x = graph.call_function(torch.ops.aten.neg.default, (x,))
        x.meta["nn_module_stack"] = stack
    graph.output(x)
    return graph


def test_five_hundred_nested_modules_are_no_recursion() -> None:
    graph = deep(500)
    view = GraphView(graph)
    innermost = view[".".join(["inner"] * 500)]
    assert len(innermost.nodes()) == 1
    assert len(view.inner.nodes()) == 500
    assert len(repr(view).splitlines()) == 3 * 500 + 1
    for twin in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert repr(twin) == repr(view)
    assert len(view.find("**")) == 501
    assert not hasattr(view, "outer")
    assert len(innermost.subgraph().nodes) == 1
    assert len(view.inner.inner.subgraph().nodes) == 499


def test_ten_thousand_nodes_are_all_there() -> None:
    graph = fx.Graph()
    for i in range(10_000):
        x = graph.call_function(torch.ops.aten.neg.default)
        fqn = f"layers.{i // 10}"
        x.meta["nn_module_stack"] = {"": ("", nn.Module), fqn: (fqn, nn.Linear)}
    graph.output(x)
    view = GraphView(graph)
    assert len(view.nodes()) == 10_000
    assert len(view.layers) == 1_000
    assert "(0-999): 1000 x Linear(10 nodes)" in repr(view)
    assert len(pickle.loads(pickle.dumps(view)).layers[-1].node_names()) == 10


def test_a_view_is_of_its_graph_as_it_was() -> None:
    gm = copy.deepcopy(cached_aot()[0])
    view = GraphView(gm)
    before = view.nodes()
    with gm.graph.inserting_after(before[-1]):
        gm.graph.call_function(torch.ops.aten.neg.default, (before[-1],))
    assert view.nodes() == before
    assert len(GraphView(gm).nodes()) == len(before) + 1


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, pytest_fxbucket.graph_view; print('torch' in sys.modules, pytest_fxbucket.graph_view.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1)[0] == "False"
    with pytest.raises(ImportError):
        from pytest_fxbucket.graph_view import NoSuchView  # noqa: F401
