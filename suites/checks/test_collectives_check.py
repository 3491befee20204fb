"""What would hang or race, or mix what ranks send, is found in small graphs made by hand, and correct graphs pass.

More in `test_broken_passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import fx

from pytest_fxbucket.compat.c10d import twin_name
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member
from pytest_fxbucket.graph.calls import Call, calls_of, joint_problems
from pytest_fxbucket.graph.pairing import mixed_launches
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import Value
from suites.checks import launches_by_hand as by_hand

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
TWINS = ("all", twin_name("all"))
GROUPS = {**dict.fromkeys(TWINS, (0, 1)), "a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "x": (0, 1), "y": (0, 1)}


def graph_of(build: Callable[[fx.Graph, fx.Node], object], size: int = 8, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """A graph of one input; ``build`` adds nodes and gives what is returned."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(size, dtype=dtype, device="meta")
    graph.output((build(graph, x),))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(size, dtype=dtype, device="meta"))
    return graph


def checked(graph: fx.Graph) -> tuple[list[Call], list[str]]:
    reading = read_graph(graph, [Value("param", "w", (), None)], [Value("value", "0", (), None)])
    return calls_of(graph, reading, GROUPS)


def gather(graph: fx.Graph, x: fx.Node, group: str = "all") -> fx.Node:
    return graph.call_function(c10d.all_gather_into_tensor.default, (x, len(GROUPS.get(group, (0, 1))), group))


def wait(graph: fx.Graph, launch: fx.Node) -> fx.Node:
    return graph.call_function(c10d.wait_tensor.default, (launch,))


def use(graph: fx.Graph, *nodes: fx.Node) -> fx.Node:
    return graph.call_function(aten.neg.default, nodes[:1])


class TestOneGraph:
    def test_a_launch_that_is_waited_for_once_and_then_read_is_fine(self) -> None:
        calls, problems = checked(graph_of(lambda g, x: use(g, wait(g, gather(g, x)))))
        assert problems == []
        assert [(call.is_wait, call.group, call.says) for call in calls] == [
            (False, (0, 1), ("all_gather_into_tensor", "", "float32", "16")),
            (True, (0, 1), ()),
        ]

    def test_a_wait_for_what_nobody_launched(self) -> None:
        _, problems = checked(graph_of(lambda g, x: wait(g, use(g, x))))
        assert problems == ["wait_tensor_default waits for neg_default, which no collective launched"]

    def test_a_wait_that_names_its_argument_is_a_wait(self) -> None:
        graph = graph_of(lambda g, x: wait(g, gather(g, x)))
        reading = read_graph(graph, [Value("param", "w", (), None)], [Value("value", "0", (), None)])
        node = next(n for n in graph.nodes if n.target is c10d.wait_tensor.default)
        node.kwargs, node.args = {"tensor": node.args[0]}, ()
        assert calls_of(graph, reading, GROUPS)[1] == []

    def test_an_input_that_is_overwritten_by_a_method_while_it_is_sent(self) -> None:
        def build(g: fx.Graph, x: fx.Node) -> fx.Node:
            launch = gather(g, x)
            g.call_method("mul_", (x, 2))
            return wait(g, launch)

        (problem,) = checked(graph_of(build))[1]
        assert "mul_ (mul_) writes to a buffer of" in problem

    def test_an_input_that_is_overwritten_after_the_wait_is_fine(self) -> None:
        def build(g: fx.Graph, x: fx.Node) -> fx.Node:
            arrived = wait(g, gather(g, x))
            g.call_function(aten.zero_.default, (x,))
            return arrived

        assert checked(graph_of(build))[1] == []

    def test_a_buffer_that_is_read_before_it_was_filled(self) -> None:
        def build(g: fx.Graph, x: fx.Node) -> fx.Node:
            out = g.call_function(aten.empty.memory_format, ([16],), {"device": torch.device("cpu")})
            out.meta["val"] = torch.empty(16, device="meta")
            launch = g.call_function(c10d.all_gather_into_tensor_out.default, (x, 2, "all"), {"out": out})
            early = use(g, out)
            wait(g, launch)
            return early

        (problem,) = checked(graph_of(build))[1]
        assert problem.startswith("aten.neg.default (neg_default) reads the buffer of")

    def test_a_reduction_in_place_whose_buffer_is_read_before_its_wait(self) -> None:
        def build(g: fx.Graph, x: fx.Node) -> fx.Node:
            launch = g.call_function(c10d.all_reduce_.default, (x, "sum", "all"))
            early = use(g, x)
            wait(g, launch)
            return early

        (problem,) = checked(graph_of(build))[1]
        assert "(neg_default) reads the buffer of" in problem

    def test_a_group_that_does_not_exist(self) -> None:
        _, problems = checked(graph_of(lambda g, x: wait(g, gather(g, x, "elsewhere"))))
        assert problems == [
            "all_gather_into_tensor (all_gather_into_tensor_default) runs on process group 'elsewhere', which does not exist"
        ]

    @pytest.mark.parametrize(
        ("target", "words"),
        [
            (torch.distributed.all_reduce, "torch.distributed.distributed_c10d.all_reduce"),
            (torch.ops.c10d.barrier.default, "c10d::barrier"),
        ],
    )
    def test_what_communicates_past_the_functional_collectives_is_said(self, target: Callable[..., object], words: str) -> None:
        (problem,) = checked(graph_of(lambda g, x: g.call_function(target, (x,))))[1]
        assert words in problem
        assert problem.endswith("which communicates in a way that cannot be followed")


def events(*words: str) -> list[Call]:
    """``launch:name:group[:op:dtype:size]`` and ``wait:name``, in the order of a rank."""
    calls: list[Call] = []
    numbers: dict[str, Call] = {}
    for word in words:
        what, name, *rest = word.split(":")
        if what == "launch":
            group, *says = rest
            numbers[name] = Call(False, len(numbers), name, GROUPS[group], tuple(says or ["all_gather", "", "float32", "8"]))
            calls.append(numbers[name])
        else:
            of = numbers[name]
            calls.append(Call(True, of.number, of.name, of.group, ()))
    return calls


class TestAcrossRanks:
    def test_equal_orders_pass(self) -> None:
        same = events("launch:p:x", "launch:q:y", "wait:p", "wait:q")
        assert joint_problems({0: same, 1: same}) == []

    def test_waits_in_another_order_are_fine_where_launches_agree(self) -> None:
        first = events("launch:p:x", "launch:q:x", "wait:p", "wait:q")
        other = events("launch:p:x", "launch:q:x", "wait:q", "wait:p")
        assert joint_problems({0: first, 1: other}) == []

    def test_two_groups_each_in_order_that_wait_for_each_other(self) -> None:
        a, b = Call(False, 0, "A", (0, 1), ("s",)), Call(False, 0, "B", (0, 1, 2), ("s",))

        def wait_for(call: Call, number: int) -> Call:
            return Call(True, number, call.name, call.group, ())

        second_b, second_a = Call(False, 1, "B", b.group, b.says), Call(False, 1, "A", a.group, a.says)
        (problem,) = joint_problems(
            {
                0: [a, wait_for(a, 0), second_b, wait_for(b, 1)],
                1: [b, wait_for(b, 0), second_a, wait_for(a, 1)],
                2: [b, wait_for(b, 0)],
            }
        )
        assert problem.startswith("the ranks would wait for each other in a circle: ")
        assert "A on ranks 0,1" in problem
        assert "B on ranks 0-2" in problem

    def test_three_groups_in_a_circle_of_three_ranks(self) -> None:
        def rank(first: Call, second: Call) -> list[Call]:
            again = Call(False, 1, second.name, second.group, second.says)
            return [first, Call(True, 0, first.name, first.group, ()), again, Call(True, 1, second.name, second.group, ())]

        ab, bc, ca = (Call(False, 0, name, group, ("s",)) for name, group in (("P", (0, 1)), ("Q", (1, 2)), ("R", (0, 2))))
        (problem,) = joint_problems({0: rank(ab, ca), 1: rank(bc, ab), 2: rank(ca, bc)})
        assert all(name in problem for name in ("P on", "Q on", "R on"))

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (("launch:q:x:all_gather::float32:4", "launch:p:x:all_gather::float32:8"), "collective 1 on ranks 0,1 differs"),
            (("launch:p:x:all_gather::float32:8", "launch:q:x:reduce_scatter:sum:float32:4"), "collective 2 on ranks 0,1"),
            (("launch:p:x:all_gather::bfloat16:8", "launch:q:x:all_gather::float32:4"), "rank 1 launches p  bfloat16 8"),
            (("launch:p:x:all_gather::float32:16", "launch:q:x:all_gather::float32:4"), "rank 1 launches p  float32 16"),
            (("launch:p:x:all_gather:sum:float32:8", "launch:q:x:all_gather::float32:4"), "rank 1 launches p sum float32 8"),
            (("launch:p:x:all_gather::float32:8",), "rank 0 launches q on ranks 0,1, which rank 1 never does"),
        ],
    )
    def test_a_difference_is_one_sentence_that_names_the_ranks(self, other: tuple[str, ...], words: str) -> None:
        first = events("launch:p:x:all_gather::float32:8", "launch:q:x:all_gather::float32:4")
        (problem,) = joint_problems({0: first, 1: events(*other)})
        assert words in problem

    def test_a_broadcast_from_two_ranks_is_a_difference(self) -> None:
        def broadcast(source: int) -> list[Call]:
            return checked(graph_of(lambda g, x: wait(g, g.call_function(c10d.broadcast.default, (x, source, "all")))))[0]

        (problem,) = joint_problems({0: broadcast(0), 1: broadcast(1)})
        assert "from 0" in problem
        assert "from 1" in problem

    def test_a_group_and_its_twin_are_two_communicators(self) -> None:
        def gathered(group: str) -> list[Call]:
            return checked(graph_of(lambda g, x: use(g, wait(g, gather(g, x, group)))))[0]

        (problem,) = joint_problems({rank: gathered(group) for rank, group in enumerate(TWINS)})
        assert problem.startswith("collective 1 on ranks 0,1 differs: rank 0 launches all_gather_into_tensor")
        assert problem.endswith(" float32 16 on a process group of its own")

    def test_what_an_exchange_sends_is_what_the_other_expects(self) -> None:
        def exchange(received: list[int], sent: list[int]) -> list[Call]:
            def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
                return wait(graph, graph.call_function(c10d.all_to_all_single.default, (x, received, sent, "all")))

            return checked(graph_of(build, sum(sent)))[0]

        assert joint_problems({0: exchange([5, 2], [5, 3]), 1: exchange([3, 7], [2, 7])}) == []
        (problem,) = joint_problems({0: exchange([5, 2], [5, 3]), 1: exchange([4, 7], [2, 7])})
        assert problem.startswith("collective 1 on ranks 0,1 differs: rank 0 sends 3 rows to rank 1 by all_to_all_single")
        assert problem.endswith(", which expects 4 of it")


def sending(*fqns: str, group: str = "all", module: str = "") -> Bucket:
    """A gather of ``fqns``, of one size whatever they are."""
    members = tuple(Member(fqn, 0, 4, 23) for fqn in fqns)
    return by_hand.gather("launch", 0, group=group, module=module, members=members)


def mixed(*ranks: tuple[Bucket, ...]) -> list[str]:
    return list(mixed_launches({rank: (GraphAnalysis(own, (), (), 0), GROUPS) for rank, own in enumerate(ranks)}))


class TestPairing:
    """Launches of one size that trade places on one rank hang nothing, and mix values."""

    def test_launches_that_trade_places_on_one_rank_are_named(self) -> None:
        one, other = sending("a"), sending("b")
        assert mixed((one, other), (one, other)) == []
        assert mixed((one, other), (other, one)) == ["launch 1 on ranks 0, 1 carries a on rank 0, and b on rank 1"]

    def test_members_behind_those_that_are_shown_tell_launches_apart(self) -> None:
        one, other = sending("a", "b", "c", "d", "e"), sending("a", "b", "c", "d", "f")
        (said,) = mixed((one, other), (other, one))
        assert said == "launch 1 on ranks 0, 1 carries e behind a, b, c and 1 more on rank 0, and f there on rank 1"

    def test_what_carries_no_parameter_is_told_apart_by_its_module(self) -> None:
        one, other, unknown = sending("", module="up"), sending("", module="down"), sending("")
        (said,) = mixed((one, other), (other, one))
        assert said == "launch 1 on ranks 0, 1 carries values of forward up on rank 0, and values of forward down on rank 1"
        assert mixed((one, other), (unknown, other)) == []

    def test_launches_on_an_unknown_group_are_left_out(self) -> None:
        one, other = sending("a", group="ghost"), sending("b", group="ghost")
        assert mixed((one, other), (other, one)) == []

    def test_each_group_has_an_order_of_its_own(self) -> None:
        one, other = sending("a", group="x"), sending("b", group="a")
        assert mixed((one, other), (other, one)) == []
