"""Order that no storage carries: random numbers, effects on the world, and operators that do not say what they do."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.order import order_of
from suites.graph.handmade import GROUP, Handmade, aten, c10d
from suites.graph.ordering import FAKE, added, directly, ordered, stays_before
from suites.graph.view_models import captured

LIBRARY = "fxbucket_order"


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """Operators that say nothing, that annotate, and that carry the tag."""
    made = torch.library.Library(LIBRARY, "DEF")
    made.define("silent(Tensor x) -> Tensor")
    made.define("annotated(Tensor(a!) x) -> ()")
    made.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    for name in ("silent", "tagged"):
        made.impl(name, torch.clone, "CompositeExplicitAutograd")
    made.impl("annotated", lambda x: None, "CompositeExplicitAutograd")
    yield made
    made._destroy()


@FAKE
def test_random_numbers_are_drawn_in_their_order_and_nothing_else_waits_for_them(fake: bool) -> None:
    made = Handmade()
    x = made.batch(2, 2)
    drawn = [made.call(aten.rand_like.default, x) for _ in range(3)]
    for node in drawn:
        made.returns(made.call(aten.neg.default, node))
    order = ordered(made, fake)
    assert added(order) == [(drawn[0].name, drawn[1].name), (drawn[1].name, drawn[2].name), (drawn[2].name, "output")]


@FAKE
def test_asserts_and_profiler_records_keep_their_order_and_hold_up_nothing(fake: bool) -> None:
    made = Handmade()
    x = made.batch(2, 2)
    first = made.call(aten._assert_async.msg, made.call(aten.all.default, x), "first")
    free = made.call(aten.neg.default, x)
    enter = made.graph.call_function(torch.ops.profiler._record_function_enter_new.default, ("step", None))
    leave = made.graph.call_function(torch.ops.profiler._record_function_exit._RecordFunction, (enter,))
    made.returns(free)
    order = ordered(made, fake)
    assert added(order) == [(first.name, enter.name), (leave.name, "output")]
    assert order.barriers == ()


@FAKE
def test_nothing_passes_an_operator_that_does_not_say_what_it_writes(fake: bool) -> None:
    made = Handmade()
    p, q = made.param("p", 2, 2), made.param("q", 2, 2)
    first = made.gathered(p)
    barrier = made.call(torch.ops.fxbucket_order.silent.default, q)
    last = made.gathered(p)
    for node in (first, barrier, last):
        made.returns(node)
    order = ordered(made, fake)
    assert stays_before(order, first, barrier)
    assert stays_before(order, barrier, last)
    assert order.barriers == (
        f"{LIBRARY}.silent.default ({barrier.name}) says nothing about what it writes: nothing is moved past it",
    )
    assert written_arguments(barrier) == []
    assert order.writers(*order.storages(q)) == (order.index[barrier],)


@FAKE
def test_an_operator_that_annotates_or_is_tagged_holds_up_only_what_it_writes(fake: bool) -> None:
    made = Handmade()
    p, q = made.param("p", 2, 2), made.param("q", 2, 2)
    tagged = made.call(torch.ops.fxbucket_order.tagged.default, q)
    annotated = made.graph.call_function(torch.ops.fxbucket_order.annotated.default, (p,))
    made.returns(made.gathered(p))
    made.returns(tagged)
    order = ordered(made, fake)
    launch = made.returned[0].all_input_nodes[0]
    assert added(order) == [(annotated.name, launch.name), (annotated.name, "output")]
    assert order.barriers == ()


def test_modules_methods_and_functions_of_python_are_barriers_that_name_themselves() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_module("layers.0", (x,))
    graph.call_method("add_", (x, 1))
    graph.call_function(torch.relu_, (x,))
    graph.call_function(fx.wrap, (x,))
    graph.call_function(operator.call, (torch.relu_, x))
    graph.call_function(torch.ops.higher_order.flex_attention, (x,))
    graph.output(x)
    said = order_of(graph).barriers
    assert [sentence.split(" ")[0] for sentence in said] == [
        *("layers.0", "add_", "torch.relu_", "torch.fx._symbolic_trace.wrap", "_operator.call", "flex_attention")
    ]
    assert all(sentence.endswith(": nothing is moved past it") for sentence in said)


def test_arithmetic_on_sizes_is_no_barrier() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    total = graph.call_function(torch.sym_max, (graph.call_function(operator.mul, (size, 2)), size))
    total = graph.call_function(max, (graph.call_function(math.floor, (total,)), 1))
    graph.output(graph.call_function(torch.sym_sqrt, (total,)))
    order = order_of(graph)
    assert (order.barriers, added(order)) == ((), [])


def test_python_writes_to_a_tensor_are_writes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.neg.default, (x,))
    part = graph.call_function(operator.getitem, (x, slice(0, 1)))
    writer = graph.call_function(operator.iadd, (part, 1))
    late = graph.call_function(aten.neg.default, (x,))
    setter = graph.call_function(operator.setitem, (x, 0, 1))
    graph.output((early, late, writer))
    order = order_of(graph)
    assert stays_before(order, early, writer)
    assert stays_before(order, writer, late)
    assert stays_before(order, late, setter)


def test_barriers_cost_an_edge_for_each_node_and_not_for_each_pair() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(300):
        graph.call_function(aten.neg.default, (x,))
        graph.call_method("sync", (x,))
    graph.output(x)
    assert sum(map(len, order_of(graph).before)) < 5 * len(graph.nodes)


@pytest.mark.parametrize("inner", ["pure", "write", "wait"])
def test_control_deps_does_what_its_subgraph_does_and_is_no_barrier(inner: str) -> None:
    from torch._inductor.fx_passes.control_dependencies import control_deps

    made = Handmade()
    p, other = made.param("p", 2, 2), made.batch(2, 2)
    target = {"pure": aten.neg.default, "write": aten.zero_.default, "wait": c10d.wait_tensor.default}[inner]
    body = fx.Graph()
    body.output(body.call_function(target, (body.placeholder("a"),)))
    early = made.gather(p)
    given = early if inner == "wait" else p
    held = made.graph.get_attr("body")
    node = made.graph.call_function(control_deps, ((other,), held, given))
    writer = directly(made, p)
    made.returned.append(node)
    graph = made.finish()
    owner = torch.nn.Module()
    owner.body = fx.GraphModule(torch.nn.Module(), body)
    copied = fx.GraphModule(owner, graph)
    order = order_of(copied.graph)
    at = {old.name: new for old, new in zip(graph.nodes, copied.graph.nodes, strict=True)}
    assert order.barriers == ()
    assert order.storages(at[node.name]).isdisjoint(order.storages(at[other.name]))
    assert stays_before(order, at[early.name], at[writer.name])
    assert stays_before(order, at[node.name], at[writer.name])
    assert (order.index[at[node.name]] in order.writers(*order.storages(at[p.name]))) is (inner == "write")


def test_a_wait_under_control_deps_ends_no_flight_but_its_own() -> None:
    from torch._inductor.fx_passes.control_dependencies import control_deps

    made = Handmade()
    p, q = made.param("p", 2, 2), made.param("q", 2, 2)
    one, two = made.gather(p), made.gather(q)
    body = fx.Graph()
    body.output(body.call_function(c10d.wait_tensor.default, (body.placeholder("a"),)))
    held = made.graph.get_attr("body")
    node = made.graph.call_function(control_deps, ((two,), held, one))
    writer = directly(made, q)
    made.returned.append(node)
    owner = torch.nn.Module()
    owner.body = fx.GraphModule(torch.nn.Module(), body)
    made.graph.owning_module = fx.GraphModule(owner, made.finish())
    order = order_of(made.graph)
    assert stays_before(order, two, writer)
    assert not stays_before(order, node, writer)


def test_attributes_that_hold_one_tensor_are_one_storage() -> None:
    owner = torch.nn.Module()
    owner.weight = torch.nn.Parameter(torch.zeros(2, 2))
    owner.tied = torch.nn.Parameter(owner.weight.detach())
    graph = fx.Graph()
    weight, tied = graph.get_attr("weight"), graph.get_attr("tied")
    launch = graph.call_function(c10d.all_reduce.default, (weight, "sum", GROUP))
    writer = graph.call_function(aten.zero_.default, (tied,))
    graph.output(graph.call_function(c10d.wait_tensor.default, (launch,)))
    order = order_of(fx.GraphModule(owner, graph).graph)
    launched, written = (next(n for n in order.nodes if n.name == name) for name in (launch.name, writer.name))
    assert stays_before(order, launched, written)


def test_an_ordinary_step_gets_no_order_beyond_its_edges_and_the_same_every_time() -> None:
    graph = captured().graphs["joint"].graph
    order = order_of(graph)
    assert (added(order), order.barriers) == ([], ())
    again = order_of(graph)
    assert (again.before, again.nodes) == (order.before, order.nodes)
    assert [again.storages(node) for node in again.nodes] == [order.storages(node) for node in order.nodes]
