"""A graph that travels to a rank is the graph that was checked: it comes back the same; its digest tells any other apart."""

from __future__ import annotations

import math
import operator
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops.cond import cond_op

from pytest_fxbucket.checks.bitwise.job import compare
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.step.portable import decode, digest, encode, encode_module, own_copy, raw_bytes

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten
INPUT = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def small(
    target: Any = aten.add.Tensor,
    other: Any = 2,
    *,
    alpha: Any = 3,
    dtype: torch.dtype = torch.float64,
    cut: slice = slice(0, 1, None),
    constant: torch.Tensor | None = None,
    order: tuple[str, str] = ("x", "y"),
    names: Callable[[str], str] = str,
    doubled: bool = True,
) -> fx.GraphModule:
    """A graph whose every detail can be changed."""
    graph, root = fx.Graph(), nn.Module()
    root.constant = torch.ones(3) if constant is None else constant
    x, y = (graph.create_node("placeholder", names(name), (), {}, names(name)) for name in order)
    held = graph.create_node("get_attr", "constant", (), {}, names("held"))
    first = graph.create_node("call_function", target, (x, other), {"alpha": alpha}, names("first"))
    wide = graph.create_node("call_function", aten._to_copy.default, (first,), {"dtype": dtype}, names("wide"))
    part = graph.create_node("call_function", operator.getitem, (wide, (cut, ...)), {}, names("part"))
    joined = graph.create_node("call_function", aten.cat.default, ([part, held.op and y],), {}, names("joined"))
    both = graph.create_node("call_function", aten.mul.Tensor, (joined, held), {}, names("both"))
    graph.output({"result": (both, [first]), "x": x} if doubled else both)
    return fx.GraphModule(root, graph)


def digest_of(graph_module: fx.GraphModule) -> str:
    return digest(encode_module(graph_module))


def there_and_back(graph_module: fx.GraphModule) -> fx.GraphModule:
    return decode(pickle.loads(pickle.dumps(encode_module(graph_module))))


def test_a_graph_comes_back_with_its_names_and_gives_the_same() -> None:
    graph_module = small()
    again = there_and_back(graph_module)
    assert str(again.graph) == str(graph_module.graph)
    old, new = graph_module(INPUT, INPUT), again(INPUT, INPUT)
    assert torch.equal(old["result"][0], new["result"][0])
    assert torch.equal(old["result"][1][0], new["result"][1][0])
    assert digest_of(again) == digest_of(graph_module)
    again.graph.lint()


def test_names_and_metadata_are_not_part_of_the_digest() -> None:
    renamed = small(names=lambda name: f"other_{name}")
    for node in renamed.graph.nodes:
        node.meta["val"] = 3
    assert digest_of(renamed) == digest_of(small())


OTHERS: dict[str, dict[str, Any]] = {
    "operator": {"target": aten.sub.Tensor},
    "overload": {"target": aten.add.Scalar},
    "number": {"other": 4},
    "float for int": {"other": 2.0},
    "bool for int": {"other": True},
    "negative zero": {"other": -0.0},
    "zero": {"other": 0.0},
    "infinity": {"other": math.inf},
    "not a number": {"other": math.nan},
    "one ulp": {"other": math.nextafter(2.0, 3)},
    "keyword": {"alpha": 4},
    "dtype": {"dtype": torch.float32},
    "slice": {"cut": slice(1, 2, None)},
    "step": {"cut": slice(0, 1, 1)},
    "constant's value": {"constant": torch.tensor([1, 1, 1 + 2**-23])},
    "constant's zero": {"constant": torch.tensor([0.0, 1, 1])},
    "constant's signed zero": {"constant": torch.tensor([-0.0, 1, 1])},
    "constant's dtype": {"constant": torch.ones(3, dtype=torch.float64)},
    "constant's shape": {"constant": torch.ones(1, 3)},
    "order of inputs": {"order": ("y", "x"), "names": lambda name: {"x": "y", "y": "x"}.get(name, name)},
    "outputs": {"doubled": False},
}


def test_every_change_of_what_a_graph_computes_changes_its_digest() -> None:
    digests = {"none": digest_of(small())} | {what: digest_of(small(**change)) for what, change in OTHERS.items()}
    same = digests.pop("order of inputs")  # inputs are told by place, not by name
    assert same == digests["none"]
    assert len(set(digests.values())) == len(digests), digests


def test_inputs_that_change_places_change_the_digest() -> None:
    graph_module = small()
    cat = next(n for n in graph_module.graph.nodes if n.target is aten.cat.default)
    cat.args = (list(reversed(cat.args[0])),)
    assert digest_of(graph_module) != digest_of(small())


def test_order_of_nodes_is_part_of_the_digest() -> None:
    graph_module = small()
    nodes = {node.name: node for node in graph_module.graph.nodes}
    nodes["wide"].append(nodes["held"])
    assert digest_of(graph_module) != digest_of(small())


def test_a_view_of_a_constant_is_told_by_its_elements() -> None:
    strided = torch.stack([torch.ones(3), torch.zeros(3)], 1)[:, 0]
    assert not strided.is_contiguous()
    assert digest_of(small(constant=strided)) == digest_of(small())
    assert raw_bytes(strided) == raw_bytes(torch.ones(3))
    assert raw_bytes(torch.ones(0)) == b""


def branching(offset: int = 1) -> fx.GraphModule:
    """A higher-order operator with a submodule for each branch."""

    def branch(other: int) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(aten.add.Tensor, (x, other)),))
        return fx.GraphModule(nn.Module(), graph)

    root, graph = nn.Module(), fx.Graph()
    root.if_true, root.if_false = branch(offset), branch(-1)
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    arms = [graph.get_attr("if_true"), graph.get_attr("if_false")]
    graph.output(graph.call_function(operator.getitem, (graph.call_function(cond_op, (flag, *arms, (x,))), 0)))
    return fx.GraphModule(root, graph)


def test_a_constant_and_its_conjugate_are_told_apart_though_they_share_their_memory() -> None:
    constant = torch.tensor([1 + 2j, 3 - 1j, 1j])
    assert len({raw_bytes(one) for one in (constant, constant.conj(), constant.conj().resolve_conj())}) == 2
    assert raw_bytes(constant.conj().imag) == raw_bytes(-constant.imag)
    assert digest_of(small(constant=constant)) != digest_of(small(constant=constant.conj()))
    assert not list(compare(0, 0, "output", "", constant.conj(), constant.conj().resolve_conj()))


def test_graphs_inside_a_graph_travel_and_count() -> None:
    again = there_and_back(branching())
    assert torch.equal(again(INPUT, True), INPUT + 1)
    assert digest_of(again) == digest_of(branching())
    assert digest_of(branching(2)) != digest_of(branching())


def test_an_attribute_of_an_attribute_travels() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.inner = nn.Module()
    root.inner.scale = torch.full((3,), 2.0)
    graph.output(graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), graph.get_attr("inner.scale"))))
    again = there_and_back(fx.GraphModule(root, graph))
    assert torch.equal(again(INPUT), INPUT * 2)


@pytest.mark.parametrize("is_made_by_autograd", [False, True])
def test_constants_that_share_memory_share_it_in_a_copy_and_not_with_the_first(is_made_by_autograd: bool) -> None:
    root, graph = nn.Module(), fx.Graph()
    root.whole = torch.ones(4, requires_grad=is_made_by_autograd) * 2
    root.part = root.whole[1:3]
    graph.output([graph.get_attr("whole"), graph.get_attr("part")])
    first = fx.GraphModule(root, graph)
    whole, part = own_copy(first)()
    with torch.no_grad():
        part.zero_()
    assert whole.tolist() == [2, 0, 0, 2]
    assert first()[0].tolist() == [2, 2, 2, 2]


def test_an_operator_without_its_overload_travels() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.neg, (graph.placeholder("x"),)))
    again = there_and_back(fx.GraphModule(nn.Module(), graph))
    assert torch.equal(again(INPUT), -INPUT)


def calling(target: Callable[..., Any], *args: Any) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"), *args)))
    return graph


def inside() -> Callable[..., Any]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    return function


def reading(name: str) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.get_attr(name))
    return graph


def calling_module(name: str) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_module(name, (graph.placeholder("x"),)))
    return graph


MODULE_LAMBDA = lambda x: x  # noqa: E731
REFUSED: dict[str, fx.Graph] = {
    r"function calls .*function, a function inside a function, which no rank can import": calling(inside()),
    "lambda": calling(MODULE_LAMBDA),
    r"neg_default \(aten.neg.default\) has a value of type object among its arguments": calling(aten.neg.default, object()),
    "attribute scale is of type int": reading("scale"),
    "inner calls the submodule inner": calling_module("inner"),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_travel_is_refused_by_name(says: str) -> None:
    root = nn.Module()
    root.scale, root.inner = 3, nn.Linear(2, 2)
    with pytest.raises(PassError, match=says):
        encode(REFUSED[says], root)


def test_the_digest_is_the_same_under_every_hash_seed() -> None:
    """Ranks are processes, each with a seed of its own; under these two a set of the branches' names has two orders."""
    code = f"import {__name__} as t; print(t.digest_of(t.small()), t.digest_of(t.branching()))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "6")
    ]
    outputs = {process.communicate()[0] for process in running}
    assert outputs == {f"{digest_of(small())} {digest_of(branching())}\n"}
