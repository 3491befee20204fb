"""Every node as a line: nothing that a tracer, a rank or an interpreter may name otherwise is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import add
from typing import Any

import pytest
import torch
from torch import fx, nn

from fixtures.models import traced
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.graph.listing import listing, notes_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def one_call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The line of a node that calls ``target``, after a placeholder ``x``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, *_given(x, args, kwargs))
    graph.output(node)
    return listing(graph, nn.Module())[1]


def _given(x: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(x if arg == "x" else arg for arg in args), kwargs


@pytest.mark.parametrize(
    ("target", "args", "line"),
    [
        (aten.sum.dim_IntList, ("x", [0, 1], True), "aten.sum.dim_IntList(%0, [0, 1], True)"),
        (aten.to.dtype, ("x", torch.bfloat16), "aten.to.dtype(%0, bfloat16)"),
        (aten.to.device, ("x", torch.device("cuda", 3), torch.float32), "aten.to.device(%0, cuda, float32)"),
        (
            aten.empty.memory_format,
            ([2], torch.strided, torch.channels_last),
            "aten.empty.memory_format([2], strided, channels_last)",
        ),
        (aten.index.Tensor, ("x", [None, slice(1, None)]), "aten.index.Tensor(%0, [None, 1::])"),
        (aten.mul.Tensor, ("x", 1e-05), "aten.mul.Tensor(%0, 1e-05)"),
        (aten.mm, ("x", (1,)), "aten.mm(%0, (1,))"),
        (add, ("x", "text"), "add(%0, 'text')"),
        (len, ("x", {"k": ...}), "len(%0, {k: Ellipsis})"),
        (c10d.all_reduce.default, ("x", "sum", "17"), "_c10d_functional.all_reduce.default(%0, 'sum', unknown group)"),
        (one_call, ("x",), f"{__name__}.one_call(%0)"),
        (add, ("x", object()), "add(%0, object)"),
    ],
)
def test_arguments_are_written_without_addresses_and_device_numbers(target: Any, args: tuple[Any, ...], line: str) -> None:
    assert one_call(target, *args) == f"%1 = {line}"


def test_a_group_given_by_name_is_its_mesh_dimension_and_other_text_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d.all_reduce.default, (x, "sum"), {"group_name": "17"})
    graph.output((graph.call_function(c10d.wait_tensor.default, (launch,)),))
    lines = listing(graph, nn.Module(), notes=notes_of(graph, {launch.name: "all_reduce norm"}), dims_of={"17": "tp"})
    assert lines == [
        "%0 = input",
        "%1 = _c10d_functional.all_reduce.default(%0, 'sum', group_name=tp)  # launch all_reduce norm",
        "%2 = _c10d_functional.wait_tensor.default(%1)  # wait all_reduce norm",
        "%3 = output (%2,)",
    ]


def conditional(names: tuple[str, str, str]) -> fx.GraphModule:
    """A graph that calls one of two others, and adds a constant; ``names`` is what the tracer calls these three."""
    branches = []
    for op in (aten.add.Tensor, aten.sub.Tensor):
        inner = fx.Graph()
        inner.output(inner.call_function(op, (inner.placeholder("y"), 1)))
        branches.append(fx.GraphModule(nn.Module(), inner))
    root, graph = nn.Module(), fx.Graph()
    for name, value in zip(names, [*branches, torch.arange(3)], strict=True):
        setattr(root, name, value)
    x = graph.placeholder("x")
    positive, negative = graph.get_attr(names[0]), graph.get_attr(names[1])
    chosen = graph.call_function(torch.ops.higher_order.cond, (x, positive, negative, (x,)))
    graph.output(graph.call_function(aten.add.Tensor, (chosen, graph.get_attr(names[2]))))
    return fx.GraphModule(root, graph)


def test_constants_and_graphs_within_are_numbered_by_first_use_whatever_the_tracer_calls_them() -> None:
    gm = conditional(("true_graph_0", "false_graph_0", "_tensor_constant0"))
    assert listing(gm.graph, gm) == [
        "%0 = input",
        "%1 = graph 0",
        "  %0 = input",
        "  %1 = aten.add.Tensor(%0, 1)",
        "  %2 = output %1",
        "%2 = graph 1",
        "  %0 = input",
        "  %1 = aten.sub.Tensor(%0, 1)",
        "  %2 = output %1",
        "%3 = higher_order.cond(%0, %1, %2, (%0,))",
        "%4 = constant 0 int64[3]",
        "%5 = aten.add.Tensor(%3, %4)",
        "%6 = output %5",
    ]
    other = conditional(("b", "a", "c"))
    assert listing(other.graph, other) == listing(gm.graph, gm)


def test_other_names_of_nodes_groups_and_files_give_the_same_lines() -> None:
    with fake_world(0, 4):
        gm, _ = traced.bare()
    graph = copy.deepcopy(gm.graph)
    (group,) = {node.args[-1] for node in graph.nodes if "all_gather" in str(node.target)}
    for i, node in enumerate(graph.nodes):
        node._rename(f"renamed_{i}")
        node.args = tuple("other" if isinstance(arg, str) and arg == group else arg for arg in node.args)
        node.meta["stack_trace"] = f'File "/elsewhere/{i}.py"'
    assert listing(graph, gm, dims_of={"other": "dp"}) == listing(gm.graph, gm, dims_of={str(group): "dp"})
