"""What kind of operator a node calls: views, writes, launches and waits, told by schema and never by a node's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph.collectives import argument, is_wait, launch_kind, read_launch, tensors, waits_of
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.ops import is_view
from suites.graph.handmade import RANKS, Handmade, aten, c10d

VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, ([4],)),
    (aten.t.default, ()),
    (aten.transpose.int, (0, 1)),
    (aten.permute.default, ([1, 0],)),
    (aten.slice.Tensor, (0, 0, 1)),
    (aten.select.int, (0, 0)),
    (aten.expand.default, ([3, 2, 2],)),
    (aten.unsqueeze.default, (0,)),
    (aten.squeeze.default, ()),
    (aten.as_strided.default, ([2], [1])),
    (aten.split_with_sizes.default, ([1, 1],)),
    (aten.split.Tensor, (1,)),
    (aten.chunk.default, (2,)),
    (aten.unbind.int, ()),
    (aten.detach.default, ()),
    (aten.alias.default, ()),
    (aten.diagonal.default, ()),
    (aten.view.dtype, (torch.int32,)),
    (aten.narrow.default, (0, 0, 1)),
    (aten._unsafe_view.default, ([4],)),
    (aten.unsafe_split_with_sizes.default, ([1, 1],)),
    (aten.reshape.default, ([4],)),
]
OTHERS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.neg.default, ()),
    (aten.add_.Tensor, (1,)),
    (aten.copy_.default, (1,)),
    (aten.clone.default, ()),
    (aten.sum.default, ()),
    (aten.view_copy.default, ([4],)),
    (aten.split_with_sizes_copy.default, ([1, 1],)),
    (aten.zero_.default, ()),
]


def call(target: Any, args: tuple[Any, ...]) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args))


@pytest.mark.parametrize(("target", "args"), VIEWS, ids=lambda value: str(value) if callable(value) else "")
def test_a_view_is_known_and_truly_shares_storage(target: Any, args: tuple[Any, ...]) -> None:
    assert is_view(call(target, args))
    x = torch.zeros(2, 2)
    result = target(x, *args)
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        assert tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(("target", "args"), OTHERS, ids=lambda value: str(value) if callable(value) else "")
def test_what_computes_or_writes_is_no_view(target: Any, args: tuple[Any, ...]) -> None:
    assert not is_view(call(target, args))


def test_every_written_argument_is_found_in_lists_and_keywords_too() -> None:
    graph = fx.Graph()
    a, b, c, d = (graph.placeholder(name) for name in "abcd")
    assert written_arguments(graph.call_function(aten.add_.Tensor, (a, b))) == [a]
    assert written_arguments(graph.call_function(aten._foreach_copy_.default, ([a, b], [c, d]))) == [a, b]
    assert written_arguments(graph.call_function(aten.add.out, (a, b), {"out": c})) == [c]
    assert written_arguments(graph.call_function(aten.split_with_sizes_copy.out, (a, [1, 1]), {"out": [c, d]})) == [c, d]
    assert written_arguments(graph.call_function(c10d.all_gather_into_tensor_out.default, (a, 2, "0"), {"out": b})) == [b]
    assert written_arguments(graph.call_function(aten.copy_.default, (), {"self": a, "src": b})) == [a]
    assert written_arguments(graph.call_function(aten.add.Tensor, (a, b))) == []
    assert written_arguments(graph.call_function(max, (a, b))) == []


KINDS = {
    "all_gather_into_tensor": ("all_gather", (RANKS, "0")),
    "reduce_scatter_tensor": ("reduce_scatter", ("avg", RANKS, "0")),
    "all_reduce": ("all_reduce", ("sum", "0")),
    "all_reduce_": ("all_reduce", ("sum", "0")),
    "broadcast": ("broadcast", (0, "0")),
    "all_to_all_single": ("all_to_all", ([1, 1], [1, 1], "0")),
}


@pytest.mark.parametrize("name", KINDS)
def test_launches_are_known_with_op_and_group(name: str) -> None:
    kind, args = KINDS[name]
    node = call(getattr(c10d, name).default, args)
    launch = read_launch(node)
    assert launch is not None
    ops = [arg for arg in args if arg in ("avg", "sum")]
    assert (launch.kind, launch.group, launch.op, launch.operator) == (kind, "0", ops[0] if ops else "", name)
    assert not is_wait(node)


def test_arguments_are_found_by_name_however_they_are_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    target = c10d.reduce_scatter_tensor.default
    by_place = graph.call_function(target, (x, "sum", 4, "7"))
    by_name = graph.call_function(target, (), {"input": x, "reduce_op": "sum", "group_size": 4, "group_name": "7"})
    for node in (by_place, by_name):
        found = [argument(node, name) for name in ("input", "reduce_op", "group_size", "group_name", "no such")]
        assert found == [x, "sum", 4, "7", None]
    assert argument(graph.call_function(aten.sum.dim_IntList, (x, [0])), "keepdim") is False


def test_a_gather_given_by_keywords_is_followed_too() -> None:
    made = Handmade()
    shard = made.param("a", 2, 2)
    launch = made.call(c10d.all_gather_into_tensor.default, input=shard, group_size=RANKS, group_name="0")
    made.loss(made.call(c10d.wait_tensor.default, tensor=launch))
    reading = made.read()
    assert reading.problems == ()
    assert reading.buckets[0].fqns == ("a",)


def test_waits_of_coalesced_launches_are_found_behind_their_parts() -> None:
    made = Handmade()
    inputs = [made.param("a", 2, 2), made.param("b", 2, 2)]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, inputs, RANKS, "0")
    waits = [made.wait(made.part(launch, i)) for i in range(2)]
    assert waits_of(launch) == waits
    assert launch_kind(launch) == "all_gather"


def test_tensors_of_a_value_are_those_in_it() -> None:
    x = torch.ones(1)
    assert tensors(x) == [x]
    assert tensors((x, None, 3)) == [x]
    assert tensors(None) == []
