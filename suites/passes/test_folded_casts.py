"""Casts before the launches become one cast of the packed tensor, exactly where nobody can tell the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten
from suites.passes.packing import assert_same

RANKS = 3
HALF = torch.bfloat16
convert = torch.ops.prims.convert_element_type.default
Cast = Callable[[Program, fx.Node], fx.Node]


def to_copy(made: Program, node: fx.Node) -> fx.Node:
    return made.call(aten._to_copy.default, node, dtype=HALF)


def converted(made: Program, node: fx.Node) -> fx.Node:
    return made.call(convert, node, HALF)


def in_place_and_order(made: Program, node: fx.Node) -> fx.Node:
    """Arguments that a packed tensor does not show: the device it is on, the order in memory."""
    return made.call(
        aten._to_copy.default,
        node,
        dtype=HALF,
        device=torch.device("cpu"),
        memory_format=torch.preserve_format,
        non_blocking=False,
    )


def casts(graph: fx.Graph) -> int:
    return sum(node.target in (aten._to_copy.default, convert) for node in graph.nodes)


def gathered(made: Program, tensors: list[fx.Node], *more: fx.Node) -> fx.Graph:
    return made.returns(*made.together("gather", tensors), *more).graph


def odd(made: Program, *dtypes: torch.dtype) -> list[fx.Node]:
    return [made.given(f"p{i}", 2 * i + 1, 3, dtype=dtype) for i, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("cast", [to_copy, converted, in_place_and_order])
@pytest.mark.parametrize("form", ["gather", "reduce", "all_reduce"])
def test_casts_of_all_members_become_one(cast: Cast, form: str) -> None:
    made = Program(RANKS)
    tensors = [cast(made, made.given(f"p{i}", RANKS, 3 + i)) for i in range(3)]
    after, built, _ = assert_same(made.returns(*made.together(form, tensors)).graph, RANKS)
    assert casts(after) == 1
    assert len(built.absorbed) == 3
    assert built.launch.meta["val"].dtype == HALF


def test_transposed_and_empty_members_are_cast_in_their_logical_order() -> None:
    made = Program(RANKS)
    p, q = made.given("p", 3, 5), made.given("q", 0, 3)
    tensors = [to_copy(made, made.call(aten.t.default, p)), to_copy(made, q), to_copy(made, made.given("r", 7))]
    after, _, _ = assert_same(gathered(made, tensors), RANKS)
    assert casts(after) == 1


def test_a_cast_that_two_members_send_is_done_for_both() -> None:
    made = Program(2)
    p, q = (to_copy(made, tensor) for tensor in made.shards("pq"))
    after, built, _ = assert_same(gathered(made, [p, q, p]), 2)
    assert casts(after) == 1
    assert len(built.absorbed) == 2


def read_elsewhere(made: Program) -> fx.Graph:
    p, q = (to_copy(made, tensor) for tensor in made.shards("pq"))
    return gathered(made, [p, q], p)


def not_all_cast(made: Program) -> fx.Graph:
    p, q = made.given("p", 3), made.given("q", 5, dtype=HALF)
    return gathered(made, [to_copy(made, p), q])


def of_several_sources(made: Program) -> fx.Graph:
    return gathered(made, [to_copy(made, tensor) for tensor in odd(made, torch.float32, torch.float64)])


def to_several_dtypes(made: Program) -> fx.Graph:
    p, q = odd(made, torch.float32, torch.float32)
    return gathered(made, [to_copy(made, p), made.call(convert, q, torch.float64)])


def to_integers(made: Program) -> fx.Graph:
    return gathered(made, [made.call(convert, tensor, torch.int32) for tensor in odd(made, torch.float32, torch.float32)])


def from_integers(made: Program) -> fx.Graph:
    return gathered(made, [to_copy(made, tensor) for tensor in odd(made, torch.int64, torch.int64)])


def no_cast_but_a_copy(made: Program) -> fx.Graph:
    return gathered(made, [made.call(aten.clone.default, tensor) for tensor in made.shards("pq")])


@pytest.mark.parametrize(
    "build",
    [read_elsewhere, not_all_cast, of_several_sources, to_several_dtypes, to_integers, from_integers, no_cast_but_a_copy],
)
def test_casts_stay_where_one_cast_would_not_be_the_same(build: Callable[[Program], fx.Graph]) -> None:
    graph = build(Program(2))
    after, built, _ = assert_same(graph, 2)
    assert built.absorbed == ()
    assert casts(after) == casts(graph)


def test_a_cast_stays_if_the_graph_says_so() -> None:
    """Somebody writes what it casts."""
    made = Program(2)
    graph = gathered(made, [to_copy(made, tensor) for tensor in made.shards("pq")])
    after, built, _ = assert_same(graph, 2, foldable=lambda cast: cast.args[0].name != "q")
    assert built.absorbed == ()
    assert casts(after) == 2
