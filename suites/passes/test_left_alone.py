"""Launches that cannot share a bucket safely, or are none of the plan's: left as they were, and the reason said."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem

import pytest
import torch
from hand_made import COLUMNS, RANKS, ROWS, HandMade, aten, c10d, launch_names
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_module

FULL = (ROWS * RANKS, COLUMNS)


def report_of(gm: fx.GraphModule, *entries: str) -> PassReport:
    targets = by_module(gm.graph, [(entry, [entry]) for entry in entries], None)
    return ManualPass().run(gm.graph, targets)


def with_others(make: Callable[[HandMade], fx.Node]) -> tuple[PassReport, list[str]]:
    """What the report says of one odd launch beside two plain gathers and two plain reductions, and the launches then."""
    made = HandMade()
    odd = make(made)
    waits = [made.gather(made.placeholder(name, ROWS, COLUMNS)) for name in ("r", "s")]
    for name in ("g", "h"):
        made.reduce(made.placeholder(name, *FULL))
    gm = made.returns(odd, *waits)
    return report_of(gm, "a"), launch_names(gm)


def _early(made: HandMade) -> fx.Node:
    wait = made.gather(made.placeholder("p", ROWS, COLUMNS))
    return made.call(aten.add.Tensor, made.call(aten.neg.default, wait.all_input_nodes[0]), wait)


def _early_part(made: HandMade) -> fx.Node:
    shards = [made.placeholder(name, ROWS, COLUMNS) for name in ("p", "q")]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, shards, RANKS, "0", module="a")
    parts = [made.call(getitem, launch, i) for i in range(2)]
    waits = [made.call(c10d.wait_tensor.default, part) for part in parts]
    return made.call(aten.add.Tensor, made.call(aten.add.Tensor, *waits), parts[1])


def _never(made: HandMade) -> fx.Node:
    shard = made.placeholder("p", ROWS, COLUMNS)
    made.call(c10d.all_gather_into_tensor.default, shard, RANKS, "0", module="a")
    return shard


def _buffer_elsewhere(made: HandMade) -> fx.Node:
    out = made.call(aten.empty.memory_format, list(FULL))
    shard = made.placeholder("p", ROWS, COLUMNS)
    launch = made.call(c10d.all_gather_into_tensor_out.default, shard, RANKS, "0", out=out, module="a")
    wait = made.call(c10d.wait_tensor.default, launch)
    return made.call(aten.add.Tensor, wait, made.call(aten.neg.default, out))


def _buffer_of_the_caller(made: HandMade) -> fx.Node:
    shard, out = made.placeholder("p", ROWS, COLUMNS), made.placeholder("out", *FULL)
    launch = made.call(c10d.all_gather_into_tensor_out.default, shard, RANKS, "0", out=out, module="a")
    return made.call(c10d.wait_tensor.default, launch)


def _in_place(made: HandMade) -> fx.Node:
    launch = made.call(c10d.all_reduce_.default, made.placeholder("p", *FULL), "sum", "0", module="a")
    return made.call(c10d.wait_tensor.default, launch)


def _broadcast(made: HandMade) -> fx.Node:
    launch = made.call(c10d.broadcast.default, made.placeholder("p", *FULL), 0, "0", module="a")
    return made.call(c10d.wait_tensor.default, launch)


def _one_rank(made: HandMade) -> fx.Node:
    launch = made.call(c10d.all_gather_into_tensor.default, made.placeholder("p", *FULL), 1, "0", module="a")
    return made.call(c10d.wait_tensor.default, launch)


def _written_in_flight(made: HandMade) -> fx.Node:
    shard = made.placeholder("p", ROWS, COLUMNS)
    launch = made.call(c10d.all_gather_into_tensor.default, shard, RANKS, "0", module="a")
    made.call(aten.add_.Tensor, made.call(aten.view.default, shard, [-1]), 1.0)
    return made.call(c10d.wait_tensor.default, launch)


def _activation_gathered(made: HandMade) -> fx.Node:
    return made.gather(made.call(aten.neg.default, made.placeholder("p", ROWS, COLUMNS)))


def _activation_reduced(made: HandMade) -> fx.Node:
    """Row-parallel: the partial products are summed, and the next weight is applied."""
    launch = made.call(c10d.all_reduce.default, made.placeholder("p", ROWS, COLUMNS), "sum", "0", module="a")
    wait = made.call(c10d.wait_tensor.default, launch)
    return made.call(aten.mm.default, made.call(aten.neg.default, wait), made.placeholder("w", COLUMNS, ROWS))


ODD: dict[str, tuple[Callable[[HandMade], fx.Node], str]] = {
    "read before its wait": (_early, "neg_default reads it before its wait"),
    "a part read before its wait": (_early_part, "add_tensor_1 reads it before its wait"),
    "never waited for": (_never, "nobody waits for it"),
    "a buffer read elsewhere": (_buffer_elsewhere, "its buffer empty_memory_format is read elsewhere, by neg_default"),
    "the caller's buffer": (_buffer_of_the_caller, "its buffer out is no new one"),
    "in place": (_in_place, "_c10d_functional.all_reduce_.default is not bucketed"),
    "another kind": (_broadcast, "_c10d_functional.broadcast.default is not bucketed"),
    "a group of one rank": (_one_rank, "its process group has one rank"),
    "written in flight": (_written_in_flight, "add__tensor writes what it sends before its wait"),
    "an activation gathered": (_activation_gathered, "it gathers what neg_default computes, no parameter"),
    "an activation reduced": (_activation_reduced, "its result goes into a product with a weight: it carries an activation"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_launch_is_left_alone_and_said_and_the_others_still_merge(case: str) -> None:
    make, reason = ODD[case]
    report, launches = with_others(make)
    assert [left.reason for left in report.left_alone] == [reason]
    assert sorted((b.kind, len(b.members)) for b in report.buckets) == [("all_gather", 2), ("reduce_scatter", 2)]
    assert len(launches) == report.launches_after == 3
    assert report.launches_before == 5


def test_shards_with_padded_rows_share_a_bucket_with_the_others() -> None:
    """DTensor pads on the ranks that have too few rows: left alone there, launches would be others than on other ranks."""
    made = HandMade()
    short, whole = made.placeholder("p", ROWS - 1, COLUMNS), made.placeholder("q", ROWS, COLUMNS)
    padded = made.call(aten.constant_pad_nd.default, short, [0, 0, 0, 1])
    gm = made.returns(made.gather(padded), made.gather(whole))
    report = report_of(gm, "a")
    assert report.left_alone == ()
    assert [bucket.members for bucket in report.buckets] == [("p", "q")]


def test_an_all_reduce_on_a_group_of_one_rank_is_left_alone() -> None:
    """Its node does not say how many ranks there are; the group does."""
    made = HandMade()
    for name in ("p", "q"):
        launch = made.call(c10d.all_reduce.default, made.placeholder(name, *FULL), "sum", "0", module="a")
        made.results.append(made.call(c10d.wait_tensor.default, launch))
    gm = made.returns()
    with fake_world(0, 1):
        report = report_of(gm, "a")
    assert [left.reason for left in report.left_alone] == ["its process group has one rank"] * 2


@pytest.mark.parametrize("kind", ["shard", "full"])
def test_values_that_are_missing_are_refused_by_the_node_s_name(kind: str) -> None:
    made = HandMade()
    waits = [made.gather(made.placeholder(name, ROWS, COLUMNS)) for name in "pq"]
    made.reduce(made.placeholder("x", *FULL))
    gm = made.returns(*waits)
    name = {"shard": "p", "full": "x"}[kind]
    next(node for node in gm.graph.nodes if node.name == name).meta.pop("val")
    before = gm.code
    with pytest.raises(PassError, match=rf"^{name} carries no fake value"):
        manual_overlap_bucketing(gm, ["a"])
    assert gm.code == before


def test_values_that_are_not_fake_are_refused() -> None:
    made = HandMade()
    gm = made.returns(*(made.gather(made.placeholder(name, ROWS, COLUMNS)) for name in "pq"))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.zeros(ROWS, COLUMNS) if node.op == "placeholder" else node.meta.get("val")
    before = gm.code
    with pytest.raises(PassError, match=r"p carries a Tensor, and merging needs a fake tensor"):
        manual_overlap_bucketing(gm, ["a"])
    assert gm.code == before
