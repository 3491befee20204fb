"""Operators whose schemas are silent, and what the tables say of them: what is written, shared, or sent in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph import effects
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.order import order_of
from suites.graph.handmade import aten, c10d
from suites.graph.ordering import stays_before

FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def fsdp(name: str) -> Any:
    __import__(FSDP)  # registers the operators
    return getattr(torch.ops.fsdp, name).default


def inductor(name: str) -> Any:
    __import__("torch._dynamo.variables")
    return getattr(torch.ops.inductor, name).default


WRITES: dict[str, Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]] = {
    "raw all_reduce": lambda g, x, y: g.call_function(torch.ops.c10d.allreduce_.default, ([x], None, None, None)),
    "raw all_gather": lambda g, x, y: g.call_function(torch.ops.c10d.allgather_.default, ([[y, x]], [y], None)),
    "resize": lambda g, x, y: g.call_function(inductor("resize_storage_bytes_"), (x, 0)),
    "copy in": lambda g, x, y: g.call_function(fsdp("all_gather_copy_in"), ([y], x, [4], 4, 0)),
    "split into": lambda g, x, y: g.call_function(fsdp("split_with_sizes_copy"), (y, [4]), {"dim": 0, "out": [x]}),
    "receive": lambda g, x, y: g.call_function(c10d.irecv.default, (x, 1, 0, "0")),
    "update statistics": lambda g, x, y: g.call_function(aten.batch_norm_update_stats.default, (y, x, None, 0.1)),
    "batch norm out": lambda g, x, y: g.call_function(
        aten.native_batch_norm.out, (y, None, None, None, None, False, 0.1, 0.1), {"out": x, "save_mean": y, "save_invstd": y}
    ),
}


@pytest.mark.parametrize("name", [name for name in WRITES if name != "receive" or hasattr(c10d, "irecv")])
def test_a_write_that_only_a_table_or_an_out_argument_tells_keeps_its_place(name: str) -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    early = graph.call_function(aten.neg.default, (x,))
    writer = WRITES[name](graph, x, y)
    late = graph.call_function(aten.neg.default, (x,))
    graph.output((early, late))
    order = order_of(graph)
    assert order.barriers == ()
    assert x in written_arguments(writer)
    assert stays_before(order, early, writer)
    assert stays_before(order, writer, late)


def test_what_was_copied_in_lives_in_the_buffer_and_only_there() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    pair = graph.call_function(fsdp("all_gather_copy_in"), ([y], x, [4], 4, 0))
    order = order_of(graph)
    assert order.storages(pair) == order.storages(x) != order.storages(y)


def test_a_tensor_set_to_another_is_one_with_it_from_then_on() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    setter = graph.call_function(aten.set_.source_Tensor, (x, y))
    writer = graph.call_function(aten.zero_.default, (y,))
    late = graph.call_function(aten.neg.default, (x,))
    graph.output(late)
    order = order_of(graph)
    assert stays_before(order, setter, writer)
    assert stays_before(order, writer, late)


def test_an_operator_that_writes_what_is_no_argument_is_a_barrier() -> None:
    graph = fx.Graph()
    node = graph.call_function(inductor("accumulate_grad_"), (graph.placeholder("x"), None, graph.placeholder("y")))
    name = "inductor.accumulate_grad_.default"
    assert order_of(graph).barriers == (
        f"{name} ({node.name}) writes what is no argument of its own: nothing is moved past it",
    )


@pytest.mark.skipif(not hasattr(c10d, "irecv"), reason="this torch has no functional sends and receives")
def test_sends_and_receives_keep_their_order_and_other_launches_do_not() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    send = graph.call_function(c10d.isend.default, (x, 1, 0, "0"))
    one, two = (graph.call_function(c10d.all_reduce.default, (node, "sum", "0")) for node in (x, y))
    receive = graph.call_function(c10d.irecv.default, (y, 1, 0, "0"))
    order = order_of(graph)
    assert stays_before(order, send, receive)
    assert not stays_before(order, one, two)


@pytest.mark.parametrize("name", sorted(effects.SHARES | effects.WRITES))
def test_every_name_in_a_table_is_an_argument_of_an_operator_where_it_exists(name: str) -> None:
    names = {*effects.SHARES.get(name, ()), *effects.WRITES.get(name, ())}
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name == name]
    arguments = {argument.name for schema in schemas for argument in schema.arguments}
    assert not schemas or names & arguments


def test_a_wait_on_the_buffer_itself_ends_the_flight_into_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(c10d.all_reduce_.default, (x, "sum", "0"))
    wait = graph.call_function(c10d.wait_tensor.default, (x,))
    late = graph.call_function(aten.neg.default, (x,))
    graph.output(late)
    assert stays_before(order_of(graph), wait, late)
