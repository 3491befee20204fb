"""Sums of reductions that stay as they are, and why: what is more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.transforms.add_before_reducing import add_before_reducing
from suites.transforms.duplicates import changed

Build = Callable[[Program, Sequence[fx.Node]], list[fx.Node]]


def _written(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first = made.reduce(nodes[0])
    made.call(aten._foreach_add_.Scalar, [nodes[0]], 1)
    return [made.neg(made.add(first, made.reduce(nodes[1])))]


def _late(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    total = made.add(made.reduce(nodes[0]), made.reduce(nodes[1]))
    made.call(aten.zero_.default, made.call(aten.view.default, total, [-1]))
    return [made.neg(total)]


def _result_written(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first, second = made.reduce(nodes[0]), made.reduce(nodes[1])
    made.call(aten.zero_.default, second)
    return [made.neg(made.add(first, second))]


def _read_too(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first = made.reduce(nodes[0])
    return [made.neg(made.add(first, made.reduce(nodes[1]))), made.neg(first)]


def _given_out_too(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first = made.reduce(nodes[0])
    return [made.neg(made.add(made.reduce(nodes[1]), first)), first]


def _cast(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    ways = [made.call(aten._to_copy.default, made.reduce(node), dtype=torch.float64) for node in nodes]
    return [made.neg(made.add(*ways))]


def _other_ways(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first, second = (made.call(aten.view.default, made.reduce(node), [3, 2]) for node in nodes)
    turned = made.call(aten.t.default, made.call(aten.view.default, first, [2, 3]))
    return [made.neg(made.add(made.call(aten.clone.default, turned), second))]


def _other_shapes(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    first, second = (made.call(aten.view.default, made.reduce(node), [3, 2]) for node in nodes)
    return [made.neg(made.add(made.call(aten.unsqueeze.default, first, 0), second))]


def _coalesced(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    (first,) = made.coalesced("reduce_scatter", [nodes[0]])
    return [made.neg(made.add(first, made.reduce(nodes[1])))]


def _strided(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    x = made.call(aten.t.default, made.call(aten.view.default, nodes[0], [3, 4]))
    return [made.neg(made.add(made.all_reduce(x), made.all_reduce(nodes[1])))]


def _broadcast(made: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    row = made.call(aten.slice.Tensor, nodes[1], 0, 0, 1)
    return [made.neg(made.add(made.all_reduce(nodes[0]), made.all_reduce(row)))]


LEFT: dict[str, tuple[Build, str]] = {
    "written": (
        _written,
        "_foreach_add__scalar (aten._foreach_add_.Scalar) writes what reduce_scatter_tensor_default sends, "
        "between both launches",
    ),
    "sum written": (_late, "zero__default (aten.zero_.default) writes the sum"),
    "result written": (
        _result_written,
        "reduce_scatter_tensor_default_1: zero__default (aten.zero_.default) writes its result",
    ),
    "read too": (_read_too, "neg_default_1 reads what reduce_scatter_tensor_default brings, too"),
    "given out too": (_given_out_too, "output reads what reduce_scatter_tensor_default brings, too"),
    "cast": (_cast, "aten._to_copy.default (_to_copy_default) stands between reduce_scatter_tensor_default and the sum"),
    "parts": (
        lambda m, n: [m.neg(m.add(*(m.call(aten.slice.Tensor, m.reduce(node), 0, 0, 1) for node in n)))],
        "aten.slice.Tensor (slice_tensor) stands between reduce_scatter_tensor_default and the sum",
    ),
    "other ways": (_other_ways, "they do not go the same way to the sum"),
    "other shapes": (_other_shapes, "they do not go the same way to the sum"),
    "in place": (lambda m, n: [m.neg(m.call(aten.add_.Tensor, m.reduce(n[0]), m.reduce(n[1])))], "add__tensor adds in place"),
    "scaled": (
        lambda m, n: [m.neg(m.call(aten.add.Tensor, m.reduce(n[0]), m.reduce(n[1]), alpha=2))],
        "add_tensor adds 2 times the second",
    ),
    "coalesced": (
        _coalesced,
        "_c10d_functional.reduce_scatter_tensor_coalesced.default (reduce_scatter_tensor_coalesced_default) is not merged",
    ),
    "strided": (_strided, "all_reduce_default sends what is not contiguous"),
    "broadcast": (_broadcast, "they reduce tensors of other shapes, dtypes or devices"),
    "max": (
        lambda m, n: [m.neg(m.add(m.reduce(n[0], "max"), m.reduce(n[1], "max")))],
        "reduce_scatter_tensor_default reduces by max, expected sum or avg",
    ),
    "op": (
        lambda m, n: [m.neg(m.add(m.reduce(n[0], "sum"), m.reduce(n[1], "avg")))],
        "they differ in kind, operation, ranks or process group",
    ),
    "group": (
        lambda m, n: [m.neg(m.add(m.reduce(n[0]), m.reduce(n[1], group="again")))],
        "they differ in kind, operation, ranks or process group",
    ),
    "in place launch": (
        lambda m, n: [m.neg(m.add(m.all_reduce(n[0]), m.wait(m.call(c10d.all_reduce_.default, n[1], "sum", "0"))))],
        "_c10d_functional.all_reduce_.default (all_reduce__default) is not merged",
    ),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_what_is_more_than_rounding_is_left_alone_and_says_why(name: str) -> None:
    made = Program(2, {"again": [[0, 1]]})
    build, why = LEFT[name]
    found = changed(made, *build(made, made.fulls("xy")), by=add_before_reducing, runs=False)
    assert found.is_same
    ((what, said),) = found.transformed.left
    assert said == why
    assert " + " in what
