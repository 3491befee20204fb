"""The storage under a node is seen through every view and every result that shares it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph.ops import returns_written
from pytest_fxbucket.graph.storages import base
from suites.graph.handmade import GROUP, RANKS, Handmade, aten, c10d


def viewed(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.t.default, made.call(aten.slice.Tensor, node, 0, 0, 1))


def parted(made: Handmade, node: fx.Node) -> fx.Node:
    return made.part(made.call(aten.split.Tensor, node, 1), 0)


def written(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.relu_.default, node)


def itself(made: Handmade, node: fx.Node) -> fx.Node:
    return node


THROUGH = [itself, viewed, parted, written]


@pytest.mark.parametrize("through", THROUGH)
def test_the_storage_under_a_node_is_found_through_all_that_shares_it(through: Callable[..., fx.Node]) -> None:
    made = Handmade()
    launch = made.gather(made.param("a", 2, 2))
    assert base(through(made, made.wait(launch))) is launch
    buffer = made.call(aten.empty.memory_format, [4, 2], dtype=torch.float32, device="cpu")
    out = made.call(c10d.all_gather_into_tensor_out.default, made.param("b", 2, 2), RANKS, GROUP, out=buffer)
    assert base(through(made, made.wait(out))) is buffer
    assert base(through(made, made.compute(launch))).target is aten.neg.default


def test_only_results_that_are_what_was_written_count_as_such() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert returns_written(graph.call_function(aten.copy_.default, (a, b)))
    assert returns_written(graph.call_function(aten.add.out, (a, b), {"out": a}))
    assert not returns_written(graph.call_function(aten.add.Tensor, (a, b)))
    assert not returns_written(graph.call_function(aten.view.default, (a, [1])))
    assert not returns_written(graph.call_function(aten._foreach_copy_.default, ([a], [b])))
    assert not returns_written(graph.call_function(max, (a, b)))
    assert not returns_written(a)
