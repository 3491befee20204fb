"""Graphs that our pass must refuse, or leave alone where it does not know what moving would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import getitem

import pytest
import torch
from hand_made import COLUMNS, RANKS, ROWS, HandMade, aten, c10d, launch_names
from torch import fx

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import Targets, by_module

FULL = (ROWS * RANKS, COLUMNS)


def refused(gm: fx.GraphModule, plan: Sequence[str | list[str]] = ("a",)) -> str:
    """What the pass says; the graph stays as it was."""
    before = gm.code, str(gm.graph)
    with pytest.raises(PassError) as error:
        manual_overlap_bucketing(gm, plan)
    assert (gm.code, str(gm.graph)) == before
    return str(error.value)


def report_of(gm: fx.GraphModule, *entries: str) -> PassReport:
    targets = by_module(gm.graph, [(entry, [entry]) for entry in entries], None)
    return ManualPass().run(gm.graph, targets)


def test_a_reduction_of_a_reduction_of_its_own_entry_is_refused() -> None:
    made = HandMade()
    first = made.reduce(made.placeholder("x", 32, COLUMNS))
    made.reduce(made.call(aten.neg.default, first))
    message = refused(made.returns())
    assert "entry 'a'" in message
    assert "reduce_scatter_tensor_default_1 depends on its result" in message


def test_a_reduction_that_another_member_needs_without_compute_is_refused() -> None:
    made = HandMade()
    made.reduce(made.reduce(made.placeholder("x", 32, COLUMNS)))
    assert "reduce_scatter_tensor_default_1 depends on its result" in refused(made.returns())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_gather_of_what_its_own_entry_gathers_is_refused(shards: int) -> None:
    made = HandMade()
    waits = [made.gather(p) for p in [made.placeholder(name, ROWS, COLUMNS) for name in ("p", "q")][:shards]]
    again = made.gather(made.call(aten.view.default, waits[-1], [COLUMNS, ROWS * RANKS]))
    gm = made.returns(*waits, again)
    with pytest.raises(PassError) as error:
        ManualPass().run(gm.graph, all_in_one_entry(gm))
    assert "view_default cannot be launched before all_gather_into_tensor_default: it depends on " in str(error.value)


def test_a_gather_of_what_was_gathered_is_left_alone_and_said() -> None:
    made = HandMade()
    first = made.gather(made.placeholder("p", ROWS, COLUMNS))
    gm = made.returns(first, made.gather(first))
    before = str(gm.graph)
    assert len(report_of(gm, "a").left_alone) == 1
    assert str(gm.graph) == before


@pytest.mark.parametrize("through", ["itself", "a view", "a part"])
@pytest.mark.parametrize("what", ["shard", "gathered", "gradient"])
def test_a_write_in_place_to_a_member_between_launches_is_refused(what: str, through: str) -> None:
    made = HandMade()
    p, q = (made.placeholder(name, ROWS, COLUMNS) for name in ("p", "q"))
    x, y = (made.placeholder(name, *FULL) for name in ("x", "y"))
    first = made.gather(p)
    made.reduce(x)
    target = {"shard": p, "gathered": first, "gradient": x}[what]
    made.call(aten.add_.Tensor, _alias(made, target, through), 1.0)
    second = made.gather(q)
    made.reduce(y)
    message = refused(made.returns(first, second))
    assert "aten.add_.Tensor (add__tensor) writes in place" in message


def test_a_parameter_that_is_written_before_its_launch_is_left_alone_and_said() -> None:
    """What is sent then is no parameter any more; the others still merge."""
    made = HandMade()
    p, q, r = (made.placeholder(name, ROWS, COLUMNS) for name in ("p", "q", "r"))
    first, second = made.gather(p), made.gather(r)
    made.call(aten.add_.Tensor, q, 1.0)
    gm = made.returns(first, second, made.gather(q))
    report = report_of(gm, "a")
    assert [bucket.members for bucket in report.buckets] == [("p", "r")]
    assert [left.reason for left in report.left_alone] == ["it carries no parameter and no parameter's gradient"]
    order = [node.name for node in gm.graph.nodes]
    assert order.index("add__tensor") < order.index("all_gather_into_tensor_default_2")


def _alias(made: HandMade, node: fx.Node, through: str) -> fx.Node:
    if through == "a view":
        return made.call(aten.view.default, node, [-1])
    return made.call(getitem, made.call(aten.split.Tensor, node, 1), 0) if through == "a part" else node


def _written_before_the_cast(made: HandMade, shard: fx.Node) -> fx.Node:
    made.call(aten.add_.Tensor, shard, 1.0)
    return made.call(aten.neg.default, shard)


def _random(made: HandMade, shard: fx.Node) -> fx.Node:
    return made.call(aten.rand_like.default, shard)


@pytest.mark.parametrize(
    ("prepare", "reason"), [(_written_before_the_cast, "writes in place to q"), (_random, "random numbers")]
)
def test_a_member_whose_value_depends_on_when_it_is_made_is_refused(
    prepare: Callable[[HandMade, fx.Node], fx.Node], reason: str
) -> None:
    made = HandMade()
    p, q = (made.placeholder(name, ROWS, COLUMNS) for name in ("p", "q"))
    first = made.gather(p)
    gm = made.returns(first, made.gather(prepare(made, q)))
    with pytest.raises(PassError, match=reason):
        ManualPass().run(gm.graph, all_in_one_entry(gm))


def all_in_one_entry(gm: fx.GraphModule) -> Targets:
    """Every gather as a member of one entry, whatever it carries."""
    made = HandMade()
    example = made.returns(made.gather(made.placeholder("p", ROWS, COLUMNS)))
    (model,) = by_module(example.graph, [("a", ["a"])], None).planned
    launches = [node for node in gm.graph.nodes if node.target is c10d.all_gather_into_tensor.default]
    planned = tuple(
        replace(model, launch=node, wait=next(iter(node.users)), fqn=f"p{i}", rank_in_registration=i)
        for i, node in enumerate(launches)
    )
    return Targets(planned, (), len(planned))


def test_what_reads_a_reduced_gradient_does_not_go_past_a_write() -> None:
    """Between two reductions of an entry: the first one's gradient is added to a tensor that is then overwritten."""
    made = HandMade()
    x, total = made.placeholder("x", *FULL), made.placeholder("total", ROWS, COLUMNS)
    first = made.reduce(x)
    seen = made.call(aten.add.Tensor, first, total)
    made.call(aten.zero_.default, total)
    made.reduce(made.call(aten.neg.default, x))
    assert "writes in place to total" in refused(made.returns(seen))


def test_a_wait_is_not_deferred_past_a_write_to_what_its_readers_read() -> None:
    made = HandMade()
    x, total = made.placeholder("x", *FULL), made.placeholder("total", ROWS, COLUMNS)
    first = made.reduce(x, "a")
    seen = made.call(aten.add.Tensor, first, total)
    made.call(aten.zero_.default, total)
    made.reduce(made.call(aten.neg.default, x), "b")
    gm = made.returns(seen)
    before = str(gm.graph)
    (left,) = report_of(gm, "a", "b").left_alone
    assert left.what == "wait of a's reduction"
    assert "writes in place to total" in left.reason
    assert str(gm.graph) == before


def test_two_waits_on_a_launch_are_left_alone_and_said() -> None:
    made = HandMade()
    first = made.gather(made.placeholder("p", ROWS, COLUMNS))
    second = made.call(c10d.wait_tensor.default, first.all_input_nodes[0])
    third = made.gather(made.placeholder("q", ROWS, COLUMNS))
    gm = made.returns(first, second, third)
    report = report_of(gm, "a")
    assert [left.reason for left in report.left_alone] == ["it has 2 waits, expected one"]
    assert report.launches_after == 2


def test_a_launch_that_is_read_before_its_wait_is_left_alone_and_said() -> None:
    made = HandMade()
    shards = [made.placeholder(name, ROWS, COLUMNS) for name in "pqr"]
    waits = [made.gather(shard) for shard in shards]
    early = made.call(aten.neg.default, waits[0].all_input_nodes[0])
    report = report_of(made.returns(early, *waits), "a")
    assert [left.reason for left in report.left_alone] == ["neg_default reads it before its wait"]
    assert [bucket.members for bucket in report.buckets] == [("q", "r")]


def test_other_collectives_are_left_alone_and_said() -> None:
    made = HandMade()
    p, q, x = (made.placeholder(name, *FULL) for name in ("p", "q", "x"))
    waits = [made.gather(p), made.gather(q)]
    launch = made.call(c10d.all_reduce.default, x, "sum", "0", module="a")
    waits.append(made.call(c10d.wait_tensor.default, launch))
    out = made.call(aten.empty.memory_format, [ROWS * RANKS * RANKS, COLUMNS])
    launch = made.call(c10d.all_gather_into_tensor_out.default, p, RANKS, "0", out=out, module="a")
    waits.append(made.call(c10d.wait_tensor.default, launch))
    gm = made.returns(*waits)
    report = report_of(gm, "a")
    reasons = sorted(left.reason.split(".default")[0] for left in report.left_alone)
    assert reasons == ["_c10d_functional.all_gather_into_tensor_out", "_c10d_functional.all_reduce"]
    assert report.launches_before == 4
    assert report.launches_after == 3
    assert len(launch_names(gm)) == 3


def test_coalesced_launches_are_left_alone_and_said() -> None:
    made = HandMade()
    shards = [made.placeholder(name, ROWS, COLUMNS) for name in "pqrs"]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, shards[:2], RANKS, "0", module="a")
    parts = [made.call(getitem, launch, i) for i in range(2)]
    waits = [made.call(c10d.wait_tensor.default, part) for part in parts]
    gm = made.returns(*waits, *(made.gather(shard) for shard in shards[2:]))
    report = report_of(gm, "a")
    assert [bucket.members for bucket in report.buckets] == [("r", "s")]
    assert any("all_gather_into_tensor_coalesced" in left.reason for left in report.left_alone)
    assert c10d.all_gather_into_tensor_coalesced.default in {node.target for node in gm.graph.nodes}


def test_values_that_are_not_fake_are_refused() -> None:
    made = HandMade()
    gm = made.returns(*(made.gather(made.placeholder(name, ROWS, COLUMNS)) for name in "pq"))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.zeros(ROWS, COLUMNS) if node.op == "placeholder" else node.meta.get("val")
    assert "not fake tensors" in refused(gm)


def test_values_that_are_missing_are_refused_by_the_node_s_name() -> None:
    made = HandMade()
    gm = made.returns(*(made.gather(made.placeholder(name, ROWS, COLUMNS)) for name in "pq"))
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    assert "p carries no fake value" in refused(gm)
