"""Invariants of passes, for users' own tests: a good pass breaks none, and each can be broken alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fixtures.models import traced
from pytest_fxbucket.checks.invariants import assert_invariants, broken_invariants
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.keep_order import without_kept_order

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


def swapped_shards(graph: fx.Graph) -> None:
    for launch, shard in (("launch_a", "b_input"), ("launch_b", "a_input")):
        node(graph, launch).update_arg(0, node(graph, shard))


def turned_ranks(graph: fx.Graph) -> None:
    """What comes from rank 1 is read as if it came from rank 0, and the other way round."""
    wait, reader = node(graph, "wait_a"), node(graph, "read_a")
    with graph.inserting_before(reader):
        parts = [graph.call_function(aten.slice.Tensor, (wait, 0, begin, begin + 8)) for begin in (8, 0)]
        turned = graph.call_function(aten.cat.default, (parts,))
    for one in (*parts, turned):
        one.meta["val"] = torch.empty(16 if one is turned else 8, device="meta")
    reader.replace_input_with(wait, turned)


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
            "all_reduce sum of output 2 (8 elements of float32) on group group_p is launched never, once before the pass",
        ),
        (second_wait, "_c10d_functional.all_gather_into_tensor.default (launch_a) is waited for 2 times, expected once"),
        (no_wait, "_c10d_functional.all_gather_into_tensor.default (launch_a) is never waited for"),
        (padding, "all_reduce on group group_p moves 48 bytes, 32 before the pass"),
        (one_more, "all_reduce on group group_p moves 64 bytes, 32 before the pass"),
        (swapped_shards, "compute read_a reads or makes b.parameter, a.parameter before the pass"),
        (turned_ranks, "aten.neg.default (read_a) reads gathered bytes that are no parameter in its order: a.parameter"),
        (
            early_reader,
            "_c10d_functional.all_gather_into_tensor.default (launch_a) is read by aten.neg.default (neg_default) without "
            "waiting for it",
        ),
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
        assert told.startswith("rank 3: all_reduce sum of output 2 (8 elements")

    def test_where_one_rank_cannot_be_read_the_others_are_compared_without_it(self) -> None:
        (told,) = broken_invariants({0: made(), 1: made()}, {0: made(), 1: changed(early_wait)})
        assert told.startswith("rank 1: the graph is not in order: wait_a stands before launch_a")
        *_, other = broken_invariants({rank: made() for rank in range(3)}, {0: made(), 1: changed(early_wait), 2: made("bar")})
        assert other == "launch 1 on ranks 0, 1, 2 carries a.parameter on rank 0, and b.parameter on rank 2"

    def test_a_launch_that_one_rank_never_reaches_is_told(self) -> None:
        def without(graph: fx.Graph) -> None:
            for name in ("launch_r", "wait_r"):
                node(graph, name).replace_all_uses_with(node(graph, "r_input"))
                graph.erase_node(node(graph, name))

        told = broken_invariants({0: made(), 1: made()}, {0: made(), 1: changed(without)})
        assert told[0].startswith("rank 1: all_reduce sum of output 2 (8 elements of float32)")
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


class TestWithoutNames:
    """Graphs of which the tracer says nothing: inputs and outputs are known by their numbers."""

    def gathered(self, first: int = 1, second: int = 2) -> fx.Graph:
        """A batch and two shards; those of these numbers are gathered first and second, and read."""
        graph = fx.Graph()
        inputs = [placeholder(graph, number) for number in range(3)]
        launches = [launch(graph, c10d.all_gather_into_tensor.default, inputs[at], 16, 2) for at in (first, second)]
        graph.output(tuple(compute(graph, waited(graph, one)) for one in launches))
        return graph

    def reduced(self, first: int = 0, second: int = 1, backward: bool = True) -> fx.Graph:
        """Two values, computed by backward or by who knows whom; those of these numbers are reduced to outputs 0 and 1."""
        graph = fx.Graph()
        made = [compute(graph, one) for one in [placeholder(graph, number) for number in range(2)]]
        launches = [launch(graph, c10d.reduce_scatter_tensor.default, made[at], 4, "sum", 2) for at in (first, second)]
        graph.output(tuple(waited(graph, one) for one in launches))
        for one in graph.nodes:
            one.meta |= {"autograd_backward": True} if backward else {}
        return graph

    def test_two_gathers_that_exchange_their_shards_are_told(self) -> None:
        told = broken_invariants(self.gathered(), self.gathered(2, 1))
        assert told == ["compute neg_default reads or makes input 2, input 1 before the pass"]

    def test_a_shard_that_is_gathered_twice_and_one_never_are_told(self) -> None:
        told = broken_invariants(self.gathered(), self.gathered(1, 1))
        assert told == [
            "all_gather of input 2 (8 elements of float32) on group group_p is launched never, once before the pass"
        ]

    def test_ranks_that_launch_in_another_order_are_told(self) -> None:
        after = self.gathered()
        node(after, "all_gather_into_tensor_default").prepend(node(after, "all_gather_into_tensor_default_1"))
        (told,) = broken_invariants({0: self.gathered(), 1: self.gathered()}, {0: after, 1: self.gathered()})
        assert told == "launch 1 on ranks 0, 1 carries input 2 on rank 0, and input 1 on rank 1"

    @pytest.mark.parametrize("backward", [True, False])
    def test_two_reductions_that_exchange_what_they_reduce_are_told(self, backward: bool) -> None:
        told = broken_invariants(self.reduced(backward=backward), self.reduced(1, 0, backward))
        assert told == ["compute neg_default reads or makes output 1, output 0 before the pass"]

    @pytest.mark.parametrize("backward", [True, False])
    def test_a_reduction_that_gives_two_outputs_is_told(self, backward: bool) -> None:
        after = self.reduced(backward=backward)
        after.output_node().args = ((node(after, "wait_tensor_default"),) * 2,)
        assert broken_invariants(self.reduced(backward=backward), after)


def placeholder(graph: fx.Graph, number: int) -> fx.Node:
    made = graph.placeholder(f"arg{number}")
    made.meta["val"] = torch.empty(8, device="meta")
    return made


def compute(graph: fx.Graph, value: fx.Node) -> fx.Node:
    return called(graph, aten.neg.default, value.meta["val"].numel(), value)


def launch(graph: fx.Graph, target: Callable[..., object], value: fx.Node, numel: int, *args: object) -> fx.Node:
    return called(graph, target, numel, value, *args, "group_p")


def waited(graph: fx.Graph, launched: fx.Node) -> fx.Node:
    return called(graph, c10d.wait_tensor.default, launched.meta["val"].numel(), launched)


def called(graph: fx.Graph, target: Callable[..., object], numel: int, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta["val"] = torch.empty(numel, device="meta")
    return made


def test_what_is_no_graph_is_named() -> None:
    with pytest.raises(UsageError, match="a value of type int is no graph; expected a GraphModule"):
        broken_invariants(3, made())  # type: ignore[arg-type]


def test_a_graph_that_is_both_and_no_graph_at_all_compare_nothing() -> None:
    """As where a pass works in place and ``before`` was not copied."""
    before = made()
    for after in (before, {0: before}):
        with pytest.raises(UsageError, match=r"before is the very graph that the pass has changed; give it copy.deepcopy"):
            assert_invariants(before, after)
    with pytest.raises(UsageError, match=r"before has graphs of ranks \[\], after of \[\]"):
        assert_invariants({}, {})


def test_another_number_of_outputs_is_told() -> None:
    after = made()
    after.output_node().args = (after.output_node().args[0][:2],)  # type: ignore[index]
    assert broken_invariants(made(), after) == ["the graph has 3 inputs and 2 outputs, 3 inputs and 3 outputs before the pass"]


def several_dtypes() -> fx.GraphModule:
    """Gathers of 7 elements of bfloat16 and 8 of float32, in a module each; both read."""
    group = dist.group.WORLD
    assert group is not None

    def step(*shards: torch.Tensor) -> list[torch.Tensor]:
        gathers = [c10d.all_gather_into_tensor(shard, 2, group.group_name) for shard in shards]
        return [-c10d.wait_tensor(one) for one in gathers]

    made = make_fx(step, tracing_mode="fake")(torch.empty(7, dtype=torch.bfloat16), torch.empty(8))
    for one in made.graph.nodes:
        name = "b" if one.name.endswith("_1") else "a"
        one.meta["nn_module_stack"] = {name: (name, torch.nn.Linear)}
    return made


def test_members_of_several_dtypes_may_be_aligned_in_one_launch() -> None:
    with fake_world(0, 2):
        before = several_dtypes()
        after = manual_overlap_bucketing(copy.deepcopy(before), [["a", "b"]], bucket_mode="custom_ops_multidtype")
        launches = [one for one in after.graph.nodes if "all_gather" in str(one.target)]
        assert [one.meta["val"].nbytes for one in launches] == [2 * (16 + 32)]  # 2 bytes each fill up 14 of bfloat16
        assert broken_invariants(before, after) == []


def test_a_pass_that_fixes_the_order_breaks_none() -> None:
    with fake_world(0, 2):
        before = traced.bare()[0]
        after = manual_overlap_bucketing(copy.deepcopy(before), LAYERS, insert_overlap_deps=True)
    assert len(after.graph.nodes) > len(without_kept_order(after.graph).nodes)
    assert broken_invariants(before, after) == []


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
