"""Packs of symbolic sizes, of values of several fake modes, and for readers that ask where in a storage they are."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.fuzz.inputs_and_outputs import differences
from pytest_fxbucket.fuzz.lockstep import run
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.passes.new_nodes import value_of
from suites.passes.packing import assert_same, integers, packed

RANKS = 2
SIZE_OPERATORS = (aten.sym_size.int, aten.sym_numel.default, operator.mul, operator.floordiv, operator.mod)


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "symbolic") -> fx.GraphModule:
    with fake_world(0, RANKS):
        gm: fx.GraphModule = make_fx(function, tracing_mode=mode)(*inputs)
    return gm


def of_all(launch: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [c10d.wait_tensor(launched) for launched in [launch(tensor) for tensor in tensors]]

    return function


def gather(tensor: torch.Tensor) -> torch.Tensor:
    return c10d.all_gather_into_tensor(tensor, RANKS, "0")


def reduce(tensor: torch.Tensor) -> torch.Tensor:
    return c10d.reduce_scatter_tensor(tensor, "sum", RANKS, "0")


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    return c10d.all_reduce(tensor, "sum", "0")


def half_gather(tensor: torch.Tensor) -> torch.Tensor:
    return gather(tensor.to(torch.bfloat16))


@pytest.mark.parametrize("launch", [gather, reduce, all_reduce, half_gather])
def test_a_pack_of_symbolic_sizes_is_right_for_other_sizes(launch: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gm = traced(of_all(launch), torch.ones(4, 5), torch.ones(6, 7, 3), torch.ones(8))
    shapes = gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(shapes.guards)
    for sizes in ([(4, 5), (6, 7, 3), (8,)], [(2, 3), (10, 1, 5), (4,)], [(4, 0), (2, 7, 3), (0,)]):
        after, built, _ = assert_same(gm.graph, RANKS, sizes=sizes)
        read_late = {source for node in built.unpack for source in node.all_input_nodes}
        assert not read_late & set(after.find_nodes(op="placeholder")), "inputs live until the wait for their sizes"
    assert any(node.target in SIZE_OPERATORS for node in after.nodes)
    assert [bucket.launches_before for bucket in run_pass(gm.graph, (), by="size", cap_mb=(1.0,)).buckets] == [3]
    assert len(shapes.guards) == guards


def test_a_pack_of_several_dtypes_and_symbolic_sizes_is_right_for_other_sizes() -> None:
    inputs = [torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5), torch.ones(7, 2, dtype=torch.int8)]
    gm = traced(of_all(gather), *inputs)
    for sizes in ([(3, 5), (5,), (7, 2)], [(2, 4), (3,), (1, 9)], [(5, 1), (0,), (3, 0)]):
        assert_same(gm.graph, RANKS, sizes=sizes)


@pytest.mark.parametrize("sizes", [[(2, 3), (4,), (3, 2)], [(6, 5), (8,), (1, 7)], [(2, 0), (0,), (0, 1)]])
def test_a_step_of_symbolic_sizes_stays_right_at_other_sizes(sizes: list[tuple[int, ...]]) -> None:
    """By the whole pass, which moves what it merges."""

    def step(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        waits = [c10d.wait_tensor(gather(p)), c10d.wait_tensor(gather(q))]
        waits += [c10d.wait_tensor(reduce(waits[0] * 2)), c10d.wait_tensor(reduce(waits[1] + 1))]
        return [*waits, c10d.wait_tensor(all_reduce(x)), c10d.wait_tensor(all_reduce(x + 1))]

    before = traced(step, torch.ones(2, 3), torch.ones(4), torch.ones(3, 2)).graph
    after = copy.deepcopy(before)
    assert [bucket.launches_before for bucket in run_pass(after, (), by="size", cap_mb=(1.0,)).buckets] == [2, 2, 2]
    outputs = []
    for graph, late in ((before, False), (after, False), (after, True)):
        outputs.append(run(graph, integers(graph, RANKS, sizes), late=late)[graph.output_node()])
    for others in outputs[1:]:
        for wanted, got in zip(outputs[0], others, strict=True):
            assert list(differences((wanted, []), (got, []))) == []


@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_a_fixed_size_behind_a_symbolic_one_does_not_settle_that(form: str) -> None:
    made = Program(RANKS)
    gm = made.returns(*made.together(form, [made.dynamic("s", 8, 3), made.given("p", 4, 3)]))
    with fake_world(0, RANKS):
        assert [bucket.launches_before for bucket in run_pass(gm.graph, (), by="size", cap_mb=(1.0,)).buckets] == [2]
    assert made.mode.shape_env is not None
    assert dict(made.mode.shape_env.replacements) == {}


def test_sizes_that_are_numbers_need_no_nodes() -> None:
    gm = traced(of_all(gather), torch.ones(4, 5), torch.ones(6), mode="fake")
    after, _, _ = assert_same(gm.graph, RANKS)
    assert not [node for node in after.nodes if node.target in SIZE_OPERATORS]


def test_a_symbolic_size_is_computed_once() -> None:
    graph = traced(of_all(gather), torch.ones(4, 4), torch.ones(6, 6)).graph
    (p, q) = graph.find_nodes(op="placeholder")
    waits = [node for node in graph.nodes if node.target == c10d.wait_tensor.default]
    launches = [node for node in graph.nodes if node.target == c10d.all_gather_into_tensor.default]
    with graph.inserting_before(graph.output_node()):
        again = [graph.node_copy(launch, lambda shard: shard) for launch in launches]
    with graph.inserting_before(graph.output_node()):
        for launch, wait in zip(again, waits, strict=True):
            graph.node_copy(wait, lambda _, launch=launch: launch)
    packed(graph, RANKS)
    calls = [(node.target, node.args) for node in graph.nodes if node.target in SIZE_OPERATORS]
    assert len(calls) == len({repr(call) for call in calls}) > 4
    assert {node.args[0] for node in graph.nodes if node.target == aten.sym_numel.default} == {p, q}


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 gathers and scatters nothing strided, without a pass neither"
)
@pytest.mark.parametrize("launch", [gather, reduce, all_reduce])
def test_a_graph_traced_with_real_tensors_has_a_fake_mode_a_node(launch: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gm = traced(of_all(launch), torch.ones(4, 5), torch.ones(3, 6).t(), torch.ones(2, 0), mode="real")
    modes = {id(node.meta["val"].fake_mode) for node in gm.graph.find_nodes(op="placeholder")}
    assert len(modes) == 3
    assert_same(gm.graph, RANKS)


def strided(made: Program, node: fx.Node) -> fx.Node:
    """Counts from the storage's beginning."""
    return made.call(aten.as_strided.default, node, [2], [1], 1)


def strided_view(made: Program, node: fx.Node) -> fx.Node:
    return strided(made, made.call(aten.view.default, node, [-1]))


def strided_part(made: Program, node: fx.Node) -> fx.Node:
    return strided(made, made.part(made.call(aten.split.Tensor, made.call(aten.view.default, node, [-1]), 3), 1))


def strided_after_a_write(made: Program, node: fx.Node) -> fx.Node:
    return strided(made, made.call(aten.add_.Tensor, node, 1.0))


def complex_view(made: Program, node: fx.Node) -> fx.Node:
    """Wants an even offset."""
    return made.call(aten.view_as_complex.default, made.call(aten.view.default, node, [-1, 2]))


def wider(made: Program, node: fx.Node) -> fx.Node:
    """Wants an offset that is a multiple of the larger dtype's size."""
    return made.call(aten.view.dtype, made.call(aten.view.default, node, [-1]), torch.complex64)


def offset(made: Program, node: fx.Node) -> fx.Node:
    where = made.call(aten.sym_storage_offset.default, node)
    return made.call(aten.add.Tensor, node, where)


@pytest.mark.parametrize("read", [strided, strided_view, strided_part, strided_after_a_write, complex_view, wider, offset])
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_a_reader_that_would_see_the_larger_storage_gets_one_of_its_own(form: str, read: Callable[..., fx.Node]) -> None:
    """A result of a reduction is a piece of what arrived; here the first has an odd number of elements."""
    made = Program(2)
    tensors = [made.given("p", 2 * 3), made.given("q", 4, 3), made.given("r", 4, 5)]
    if form == "all_reduce":
        tensors[0] = made.given("s", 3)
    p, q, r = made.together(form, tensors)
    after, _, _ = assert_same(made.returns(p, read(made, q), r).graph, 2)
    copied = sum(node.target == aten.clone.default for node in after.nodes)
    assert copied == (3 if form == "gather" else 1)  # each member of a gather is copied anyway


def test_bytes_of_rows_are_rows_of_bytes() -> None:
    """Of a tensor of rows only the operator says what it is as another dtype."""
    with FakeTensorMode() as mode:
        rows = torch.empty(2, 3)
    value = value_of(mode, aten.view.dtype, (rows, torch.uint8), {})
    assert (tuple(value.shape), value.dtype) == ((2, 12), torch.uint8)
