"""What parted the buckets of an entry is said in a sentence, for each reason that there is, and with the figures."""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
import torch
from hand_made import COLUMNS, RANKS, ROWS, HandMade, aten, c10d, chain
from torch import fx

from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.grouping import grouping_of
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport, remedy, sentence
from pytest_fxbucket.passes.targets import by_module, by_size
from pytest_fxbucket.plan.tables import Bucket

SHARD = ROWS * COLUMNS * 4 * RANKS
FULL = (ROWS * RANKS, COLUMNS)


def report_of(gm: fx.GraphModule, *entries: str, **options: Any) -> PassReport:
    targets = by_module(gm.graph, [(entry, [entry]) for entry in entries], None) if entries else by_size(gm.graph)
    return ManualPass.of(**options).run(gm.graph, targets)


def said(report: PassReport) -> list[list[str]]:
    """Sentences of each bucket."""
    return [[sentence(split, bucket.kind) for split in bucket.splits] for bucket in report.buckets]


def gathered(made: HandMade, name: str, group: str = "0", dtype: torch.dtype = torch.float32) -> fx.Node:
    shard = made.placeholder(name)
    with made.mode:
        shard.meta["val"] = torch.empty(ROWS, COLUMNS, dtype=dtype)
    launch = made.call(c10d.all_gather_into_tensor.default, shard, RANKS, group, module="a")
    return made.call(c10d.wait_tensor.default, launch, module="a")


def reduced(made: HandMade, full: fx.Node, op: str) -> None:
    launch = made.call(c10d.reduce_scatter_tensor.default, full, op, RANKS, "0", module="a")
    made.results.append(made.call(c10d.wait_tensor.default, launch, module="a"))


def test_a_bucket_that_nothing_parted_has_no_reason() -> None:
    report = report_of(chain(), "a", "b", "c")
    assert [(bucket.launches_before, bucket.launches_after, bucket.splits) for bucket in report.buckets] == [(2, 1, ())] * 3


def test_merging_that_is_off_is_the_reason() -> None:
    report = report_of(chain(("a",)), "a", enabled=False)
    assert said(report) == [["merging is off (bucket.enabled = false)"]] * 2
    assert said(report_of(gathered_once(), "a", enabled=False)) == [[]], "alone it was apart from nothing"


def gathered_once() -> fx.GraphModule:
    made = HandMade()
    return made.returns(gathered(made, "p"))


def test_the_other_direction_is_said_of_gathers_and_of_reductions() -> None:
    made = HandMade()
    waits = [gathered(made, "p"), gathered(made, "q")]
    for name in "xy":
        reduced(made, made.placeholder(name, *FULL), "avg")
    for node in (waits[1].all_input_nodes[0], made.results[1].all_input_nodes[0]):
        node.meta["autograd_backward"] = True
    assert said(report_of(made.returns(*waits), "a")) == [
        ["in backward it is gathered anew: one launch for both would keep it gathered in between"],
        ["in forward it is gathered anew: one launch for both would keep it gathered in between"],
        ["in backward there are reductions too: one launch for both would hold back the earlier"],
        ["in forward there are reductions too: one launch for both would hold back the earlier"],
    ]


def test_two_process_groups_are_said_by_mesh_dimension_where_it_is_known() -> None:
    made = HandMade()
    report = report_of(made.returns(gathered(made, "p", "0"), gathered(made, "q", "7")), "a")
    assert said(report)[0] == ["it runs on process group 0, others of its entry on 7, and a launch has one"]
    (split,) = report.buckets[1].splits
    dims = {"0": "dp_shard", "7": "tp"}
    assert sentence(split, "all_gather", dims).startswith("it runs on process group tp, others of its entry on dp_shard")
    assert report.to_dict(dims)["buckets"][1]["group"] == "tp"
    assert remedy(split, "all_gather") == "shard both over the same mesh dimension"


def test_two_reductions_are_said() -> None:
    made = HandMade()
    for name, op in (("x", "avg"), ("y", "sum")):
        reduced(made, made.placeholder(name, *FULL), op)
    assert said(report_of(made.returns(), "a")) == [
        ["it reduces by avg, others of its entry by sum, and a launch has one reduction"],
        ["it reduces by sum, others of its entry by avg, and a launch has one reduction"],
    ]


def test_two_devices_are_said() -> None:
    made = HandMade()
    gm = made.returns(gathered(made, "p"), gathered(made, "q"))
    first, second = by_module(gm.graph, [("a", ["a"])], None).planned
    found = grouping_of(order_of(gm.graph), [first, replace(second, device="cuda:1")], Bucket(), ["a"])
    ((_, _), (_, (split,))) = found
    assert sentence(split, "all_gather") == "it is on cuda:1, others of its entry on cpu"


def test_two_dtypes_are_said_with_the_way_out_that_the_kind_has() -> None:
    made = HandMade()
    report = report_of(made.returns(gathered(made, "p"), gathered(made, "q", dtype=torch.bfloat16)), "a")
    assert said(report)[1] == ["its dtype is bfloat16, that of others of its entry float32"]
    (split,) = report.buckets[1].splits
    assert remedy(split, "all_gather").startswith('set bucket.dtypes = "mixed"')
    assert remedy(split, "reduce_scatter").startswith("set parallel.reduce_dtype")


def test_a_launch_that_carries_several_dtypes_already_is_said() -> None:
    made = HandMade()
    shards = [made.placeholder(name) for name in "pq"]
    with made.mode:
        shards[1].meta["val"] = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, shards, RANKS, "0", module="a")
    waits = [made.call(c10d.wait_tensor.default, made.call(getitem, launch, i)) for i in range(2)]
    report = report_of(made.returns(*waits, gathered(made, "r")), "a")
    assert "its launch carries several dtypes already, and stays as it was" in said(report)[0]
    assert report.buckets[0].launches_before == 1
    assert report.buckets[0].dtype == "bfloat16+float32"


def test_a_bucket_of_an_earlier_run_is_said() -> None:
    gm = chain(("a",))
    one_each = {"cap_mb": (SHARD / (1 << 20),)}
    report_of(gm, "a", **one_each)
    assert said(report_of(gm, "a")) == [["what an earlier run made a bucket stays as it is"]] * 2


def test_a_cap_is_said_with_its_figures_and_what_would_be_enough() -> None:
    cap = 2 * SHARD / (1 << 20)
    made = HandMade()
    report = report_of(made.returns(*(gathered(made, name) for name in "pqr")), "a", cap_mb=(cap,))
    sentences = f"cap_mb = {cap:g} (192 bytes) is reached: 192 bytes, and r would add 96"
    assert [bucket.members for bucket in report.buckets] == [("p", "q"), ("r",)]
    assert said(report) == [[sentences], [sentences]]
    assert remedy(report.buckets[0].splits[0], "all_gather") == (
        "set bucket.cap_mb to at least 0.001 for that one, or to 0 for no cap"
    )


def test_a_member_above_the_cap_is_said() -> None:
    made = HandMade()
    report = report_of(made.returns(*(gathered(made, name) for name in "pq")), "a", cap_mb=(SHARD / (1 << 21),))
    assert [line[0].partition(", above")[0] for line in said(report)] == ["p alone has 96 bytes", "q alone has 96 bytes"]


def test_by_size_the_cap_of_each_bucket_is_said() -> None:
    made = HandMade()
    caps = (SHARD / (1 << 20), 2 * SHARD / (1 << 20))
    report = report_of(made.returns(*(gathered(made, name) for name in "pqrs")), by="size", cap_mb=caps)
    assert [bucket.members for bucket in report.buckets] == [("p",), ("q", "r"), ("s",)]
    assert [line[0].partition(": ")[2] for line in said(report)] == [
        "96 bytes, and q would add 96",
        "192 bytes, and s would add 96",
        "192 bytes, and s would add 96",
    ]


@pytest.mark.parametrize("steps", [1, 5])
def test_a_member_that_needs_another_one_is_said_and_both_are_named(steps: int) -> None:
    made = HandMade()
    gradient = made.reduce(made.placeholder("x", 64, COLUMNS))
    for _ in range(steps):
        gradient = made.call(aten.neg.default, gradient)
    made.reduce(gradient)
    made.reduce(made.placeholder("y", 64, COLUMNS))
    report = report_of(made.returns(), "a")
    why = "output 1 needs the result of output 0, so that one launch cannot have both"
    assert [bucket.members for bucket in report.buckets] == [("output 0", "output 2"), ("output 1",)]
    assert said(report) == [[why], [why]]


def test_of_a_longer_chain_each_part_names_the_member_before_it() -> None:
    made = HandMade()
    gradient = made.placeholder("x", 256, COLUMNS)
    for _ in range(3):
        gradient = made.call(aten.neg.default, made.reduce(gradient))
    assert [line[0].partition(",")[0] for line in said(report_of(made.returns(), "a"))] == [
        "output 1 needs the result of output 0",
        "output 1 needs the result of output 0",
        "output 2 needs the result of output 1",
    ]


def test_a_circle_is_said_with_the_bucket_that_it_goes_through() -> None:
    made = HandMade()
    x, y = made.placeholder("x", 64, COLUMNS), made.placeholder("y", 64, COLUMNS)
    made.reduce(made.call(aten.neg.default, made.reduce(x, "a")), "b")
    made.reduce(made.call(aten.neg.default, made.reduce(y, "b")), "a")
    report = report_of(made.returns(), "a", "b")
    parted = [(bucket.entry, line) for bucket, line in zip(report.buckets, said(report), strict=True) if line]
    (entry,) = {entry for entry, _ in parted}
    other = "b" if entry == "a" else "a"
    why = f"as one launch it and the reduce_scatter of {other} would wait for each other in a circle"
    assert parted == [(entry, [why])] * 2
