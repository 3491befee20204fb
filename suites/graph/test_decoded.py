"""A graph that is sent again is not decoded again, and is what was sent all the same."""

from __future__ import annotations

import pickle
import sys
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx, nn

from pytest_fxbucket.step import decoded
from pytest_fxbucket.step.decoded import DecodedGraphs
from pytest_fxbucket.step.portable import PortableGraph, encode

aten = torch.ops.aten
X = torch.zeros(2)


def plus(other: Any, constant: torch.Tensor | None = None, function: Any = aten.add.Tensor) -> PortableGraph:
    """``x + other``, or plus the constant, as it arrives."""
    graph, root = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    if constant is not None:
        root.inner = nn.Module()
        root.inner.constant = constant
        other = graph.get_attr("inner.constant")
    graph.output(graph.call_function(function, (x, other)))
    return pickle.loads(pickle.dumps(encode(graph, root)))


def taken(graphs: DecodedGraphs, one: PortableGraph) -> fx.GraphModule:
    return graphs.take({"": one}, keep=True)[""]


def test_a_graph_is_found_again_with_the_attributes_that_were_sent_now():
    graphs = DecodedGraphs()
    first = taken(graphs, plus(None, torch.ones(2)))
    first.inner.constant.add_(5)
    again = taken(graphs, plus(None, torch.full((2,), 3.0)))
    assert again is first
    assert again(X).tolist() == [3, 3]


def test_a_parameter_and_a_plain_tensor_take_each_others_place():
    graphs = DecodedGraphs()
    kinds = (nn.Parameter(torch.ones(2)), torch.full((2,), 2.0), nn.Parameter(torch.full((2,), 3.0)))
    made = [taken(graphs, plus(None, one)) for one in kinds]
    assert made[0] is made[1] is made[2]
    assert made[0](X).tolist() == [3, 3]


def test_equal_graphs_of_one_call_are_modules_of_their_own():
    graphs = DecodedGraphs()
    for _ in range(2):
        one, other = graphs.take({"a": plus(None, torch.ones(2)), "b": plus(None, torch.full((2,), 2.0))}, keep=True).values()
        assert (one(X).tolist(), other(X).tolist()) == ([1, 1], [2, 2])


def test_ranks_that_are_threads_of_one_process_have_graphs_of_their_own():
    graphs = DecodedGraphs()
    mine = taken(graphs, plus(None, torch.ones(2)))
    theirs: list[fx.GraphModule] = []
    rank = Thread(target=lambda: theirs.append(taken(graphs, plus(None, torch.full((2,), 2.0)))))
    rank.start()
    rank.join()
    assert (mine(X).tolist(), theirs[0](X).tolist()) == ([1, 1], [2, 2])


@pytest.mark.parametrize("others", [(1, 1.0), (1, True), (0.0, -0.0)])
def test_numbers_that_are_equal_and_not_the_same_are_other_graphs(others: tuple[Any, Any]):
    graphs = DecodedGraphs()
    assert [str(type(n.args[1])) + str(n.args[1]) for one in others for n in adds(taken(graphs, plus(one)))] == [
        str(type(one)) + str(one) for one in others
    ]


def adds(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=aten.add.Tensor)


def test_a_function_that_was_imported_anew_is_the_new_one(monkeypatch: pytest.MonkeyPatch):
    graphs, module = DecodedGraphs(), ModuleType("users_module")
    monkeypatch.setitem(sys.modules, "users_module", module)
    made = []
    for by in (1, 2):
        exec(f"def f(x, other): return x + other + {by}", module.__dict__)
        made.append(taken(graphs, plus(0, function=module.f))(X).tolist())
    assert made == [[1, 1], [2, 2]]


def test_graphs_of_operators_that_modules_register_and_those_not_to_be_kept_are_decoded_each_time():
    graphs, theirs = DecodedGraphs(), PortableGraph(plus(1).rows, {}, ("string",))
    assert taken(graphs, theirs) is not taken(graphs, theirs)
    one, other = (graphs.take({"": plus(1)}, keep=False)[""] for _ in range(2))
    assert one is not other


def test_the_oldest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoded, "_MOST_NODES", 6)
    graphs = DecodedGraphs()
    first, second = taken(graphs, plus(1)), taken(graphs, plus(2))
    assert taken(graphs, plus(1)) is first
    third = taken(graphs, plus(3))
    assert [taken(graphs, plus(3)) is third, taken(graphs, plus(1)) is first] == [True, True]
    assert taken(graphs, plus(2)) is not second
