"""Invariants of passes, for users' own tests: a good pass breaks none, and each can be broken alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import fx

from fixtures.models import traced
from pytest_fxbucket.checks.invariants import assert_invariants, broken_invariants
from pytest_fxbucket.compat.fake_group import fake_world
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.passes import manual_overlap_bucketing

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
LAYERS = ["layers.0", "layers.1", "layers.2"]


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(one for one in graph.nodes if one.name == name)


def made(order: str = "abr", groups: str = "ppp") -> fx.Graph:
    """Gathers of weights `a` and `b`, an all-reduce `r` of the batch, launched in `order`, each on a group, and read."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(f"{name}_input") for name in "abr"}
    for one in inputs.values():
        one.meta["val"] = torch.empty(8, device="meta")
    group_of = dict(zip("abr", groups, strict=True))
    launches = {}
    for name in order:
        target, args = (c10d.all_reduce.default, ("sum",)) if name == "r" else (c10d.all_gather_into_tensor.default, (2,))
        launches[name] = graph.create_node(
            "call_function", target, (inputs[name], *args, f"group_{group_of[name]}"), name=f"launch_{name}"
        )
        launches[name].meta["val"] = torch.empty(8 if name == "r" else 16, device="meta")
    readers = []
    for name in "abr":
        wait = graph.create_node("call_function", c10d.wait_tensor.default, (launches[name],), name=f"wait_{name}")
        reader = graph.create_node("call_function", aten.neg.default, (wait,), name=f"read_{name}")
        for one in (wait, reader):
            one.meta["val"] = launches[name].meta["val"]
            one.meta["nn_module_stack"] = {} if name == "r" else {name: (name, torch.nn.Linear)}
        readers.append(reader)
    graph.output(tuple(readers))
    return graph


def changed(change: Callable[[fx.Graph], object]) -> fx.Graph:
    graph = made()
    change(graph)
    return graph


def other_member(graph: fx.Graph) -> None:
    node(graph, "launch_b").replace_input_with(node(graph, "b_input"), node(graph, "a_input"))


def other_reduction(graph: fx.Graph) -> None:
    node(graph, "launch_r").update_arg(1, "avg")


def second_wait(graph: fx.Graph) -> None:
    with graph.inserting_after(node(graph, "wait_a")):
        graph.call_function(c10d.wait_tensor.default, (node(graph, "launch_a"),))


def no_wait(graph: fx.Graph) -> None:
    node(graph, "read_a").replace_input_with(node(graph, "wait_a"), node(graph, "a_input"))
    graph.erase_node(node(graph, "wait_a"))


def padding(graph: fx.Graph) -> None:
    """Zeros behind what is reduced, cut off again."""
    launch, source = node(graph, "launch_r"), node(graph, "r_input")
    with graph.inserting_before(launch):
        zeros = graph.call_function(aten.new_zeros.default, (source, [4]))
        zeros.meta["val"] = torch.empty(4, device="meta")
        wide = graph.call_function(aten.cat.default, ([source, zeros],))
        wide.meta["val"] = torch.empty(12, device="meta")
    launch.replace_input_with(source, wide)
    launch.meta["val"] = node(graph, "wait_r").meta["val"] = wide.meta["val"]
    with graph.inserting_after(node(graph, "wait_r")):
        part = graph.call_function(aten.slice.Tensor, (node(graph, "wait_r"), 0, 0, 8))
        part.meta["val"] = source.meta["val"]
    node(graph, "read_r").replace_input_with(node(graph, "wait_r"), part)


def early_reader(graph: fx.Graph) -> None:
    with graph.inserting_before(node(graph, "wait_a")):
        graph.call_function(aten.neg.default, (node(graph, "launch_a"),))


def early_wait(graph: fx.Graph) -> None:
    node(graph, "launch_a").prepend(node(graph, "wait_a"))


def one_more(graph: fx.Graph) -> None:
    with graph.inserting_before(node(graph, "wait_a")):
        launch = graph.call_function(c10d.all_reduce.default, (node(graph, "r_input"), "sum", "group_p"))
        graph.call_function(c10d.wait_tensor.default, (launch,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            other_member,
            "all_gather of b.parameter (8 elements of float32) on group group_p is launched never, once before the pass",
        ),
        (
            other_reduction,
            "all_reduce sum of 8 elements of float32 on group group_p is launched never, once before the pass",
        ),
        (second_wait, "_c10d_functional.all_gather_into_tensor.default (launch_a) is waited for 2 times, expected once"),
        (no_wait, "_c10d_functional.all_gather_into_tensor.default (launch_a) is never waited for"),
        (padding, "all_reduce on group group_p moves 48 bytes, 32 before the pass"),
        (one_more, "all_reduce on group group_p moves 64 bytes, 32 before the pass"),
        (early_reader, "_c10d_functional.all_gather_into_tensor.default (launch_a) is read by aten.neg.default (neg_default)"),
        (early_wait, "the graph is not in order: wait_a stands before launch_a, which it needs"),
    ],
)
def test_each_invariant_is_broken_alone(change: Callable[[fx.Graph], object], said: str) -> None:
    (told,) = broken_invariants(made(), changed(change))
    assert told.startswith(said)
    with pytest.raises(AssertionError, match="1 broken after the pass:\n"):
        assert_invariants(made(), changed(change))


class TestRanks:
    def test_ranks_that_launch_in_another_order_are_told(self) -> None:
        (told,) = broken_invariants({0: made(), 1: made()}, {0: made(), 1: made("arb")})
        assert told.startswith("collective 2 on ranks 0,1 differs: rank 0 launches all_gather_into_tensor")
        assert broken_invariants({0: made(), 1: made()}, {0: made("bar"), 1: made("bar")}) == []

    def test_another_order_of_parameters_of_one_size_is_told(self) -> None:
        (told,) = broken_invariants({0: made(), 1: made()}, {0: made(), 1: made("bar")})
        assert told == "launch 1 on ranks 0, 1 carries a.parameter on rank 0, and b.parameter on rank 1"

    def test_what_one_rank_alone_breaks_is_told_with_its_number(self) -> None:
        (told,) = broken_invariants({0: made(), 3: made()}, {0: made(), 3: changed(other_reduction)})[:1]
        assert told.startswith("rank 3: all_reduce sum of 8 elements")

    def test_a_launch_that_one_rank_never_reaches_is_told(self) -> None:
        def without(graph: fx.Graph) -> None:
            for name in ("launch_r", "wait_r"):
                node(graph, name).replace_all_uses_with(node(graph, "r_input"))
                graph.erase_node(node(graph, name))

        told = broken_invariants({0: made(), 1: made()}, {0: made(), 1: changed(without)})
        assert told[0].startswith("rank 1: all_reduce sum of 8 elements of float32")
        assert told[-1] == "rank 0 launches all_reduce (launch_r) on ranks 0,1, which rank 1 never does"

    def test_ranks_that_would_wait_for_each_other_in_a_circle_are_told(self) -> None:
        """Every rank launches in the order it always did; the groups of two ranks close a circle with those of all."""

        def waiting(order: str, group: str) -> fx.Graph:
            graph = made(order, f"p{group}p")
            for name in order:  # each is waited for at once
                launch = node(graph, f"launch_{name}")
                launch.append(node(graph, f"wait_{name}"))
            return graph

        before = {0: waiting("abr", "q"), 1: waiting("bar", "q"), 2: waiting("abr", "x")}
        told = broken_invariants(before, copy.deepcopy(before))
        assert any("wait for each other in a circle" in one for one in told), told

    def test_other_ranks_before_than_after_are_an_error(self) -> None:
        with pytest.raises(UsageError, match=r"before has graphs of ranks \[0\], after of \[0, 1\]; give both of each"):
            broken_invariants({0: made()}, {0: made(), 1: made()})


def test_what_is_no_graph_is_named() -> None:
    with pytest.raises(UsageError, match="a value of type int is no graph; expected a GraphModule"):
        broken_invariants(3, made())  # type: ignore[arg-type]


def test_another_number_of_outputs_is_told() -> None:
    after = made()
    after.output_node().args = (after.output_node().args[0][:2],)  # type: ignore[index]
    assert broken_invariants(made(), after) == ["the graph has 3 inputs and 2 outputs, 3 inputs and 3 outputs before the pass"]


def test_our_own_pass_breaks_none_on_any_rank() -> None:
    before, after = {}, {}
    for rank in range(2):
        with fake_world(rank, 2):
            before[rank] = traced.bare()[0]
            after[rank] = manual_overlap_bucketing(copy.deepcopy(before[rank]), LAYERS)
    launches = [len([one for one in gm.graph.nodes if "all_gather" in str(one.target)]) for gm in (before[0], after[0])]
    assert launches[0] > launches[1]
    assert broken_invariants(before, after) == []
    assert_invariants(before[0].graph, after[0].graph)
