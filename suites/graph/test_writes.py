"""Writes in place near a launch are seen through every view and every result that shares the storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from handmade import GROUP, RANKS, Handmade, aten, c10d
from torch import fx

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.hazards import base, refuse_writes
from pytest_fxbucket.graph.ops import returns_written


def refused(made: Handmade) -> str:
    """What is said of moving the first launch; empty if it may be moved."""
    graph = made.finish()
    try:
        refuse_writes(graph, [next(node for node in graph.nodes if launch_kind(node))])
    except PassError as error:
        return str(error)
    return ""


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


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("what", ["what is sent", "what it was packed of", "what arrives"])
def test_a_write_that_no_edge_orders_is_refused_by_name(what: str, through: Callable[..., fx.Node]) -> None:
    made = Handmade()
    shard = made.param("a", 2, 2)
    packed = made.call(aten.clone.default, shard)
    arrived = made.gathered(packed)
    target = {"what is sent": packed, "what it was packed of": shard, "what arrives": arrived}[what]
    made.call(aten.mul_.Tensor, through(made, target), 2)
    made.loss(arrived)
    said = refused(made)
    assert said.startswith("all_gather_into_tensor_default cannot be moved safely: aten.")
    assert f"writes in place to {base(target).name}, which it reads or brings" in said


@pytest.mark.parametrize("through", THROUGH)
def test_what_is_written_elsewhere_is_no_reason(through: Callable[..., fx.Node]) -> None:
    made = Handmade()
    other = made.compute(made.batch(2, 2))
    made.call(aten.mul_.Tensor, through(made, other), 2)
    made.loss(made.gathered(made.param("a", 2, 2)))
    assert refused(made) == ""


def test_a_launch_of_what_a_write_returned_is_ordered_by_its_edge() -> None:
    """A gradient that is scaled in place before its reduction."""
    made = Handmade()
    scaled = made.call(aten.div_.Scalar, made.compute(made.batch(4, 2)), 2)
    made.returns(made.reduced(scaled), fqn="a")
    assert refused(made) == ""


@pytest.mark.parametrize("later", ["what it wrote to", "what it returned"])
def test_a_second_write_to_what_a_write_returned_is_refused(later: str) -> None:
    made = Handmade()
    gradient = made.compute(made.batch(4, 2))
    scaled = made.call(aten.div_.Scalar, gradient, 2)
    made.returns(made.reduced(scaled), fqn="a")
    made.call(aten.add_.Tensor, gradient if later == "what it wrote to" else scaled, 1)
    said = refused(made)
    assert "aten.add_.Tensor (" in said
    assert said.endswith("writes in place to neg_default, which it reads or brings")


def test_a_buffer_that_the_launch_itself_fills_is_refused_if_another_fills_it_too() -> None:
    made = Handmade()
    whole = made.call(aten.empty.memory_format, [4, 2], dtype=torch.float32, device="cpu")
    mine = made.call(aten.slice.Tensor, whole, 0, 0, 2)
    made.call(aten.copy_.default, mine, made.param("a", 2, 2))
    made.loss(made.wait(made.call(c10d.all_gather_into_tensor_out.default, mine, RANKS, GROUP, out=whole)))
    assert "aten.copy_.default (copy__default) writes in place to empty_memory_format" in refused(made)


def test_a_buffer_that_only_the_launch_fills_is_no_reason() -> None:
    made = Handmade()
    whole = made.call(aten.empty.memory_format, [4, 2], dtype=torch.float32, device="cpu")
    made.loss(made.wait(made.call(c10d.all_gather_into_tensor_out.default, made.param("a", 2, 2), RANKS, GROUP, out=whole)))
    assert refused(made) == ""


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
