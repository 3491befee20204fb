"""What parted the buckets of an entry is said in a sentence, for each reason that there is, and with the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import COLUMNS, Program, c10d
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.bucketer import Bucketer
from pytest_fxbucket.passes.grouping import grouping_of
from pytest_fxbucket.passes.report import PassReport, SplitReason, remedy, sentence
from pytest_fxbucket.passes.targets import by_module
from pytest_fxbucket.plan.schema_bucket import Bucket
from suites.passes.programs import chain

RANKS = 4
GATHERED = 2 * COLUMNS * 4 * RANKS
"""Bytes of what a shard of these is gathered to."""
MB = 1 << 20


def said(report: PassReport) -> list[list[str]]:
    """Sentences of each bucket."""
    return [[sentence(split, bucket.kind) for split in bucket.splits] for bucket in report.buckets]


def gathering(names: str) -> fx.Graph:
    made = Program(RANKS)
    return made.returns(*map(made.gather, made.shards(names))).graph


def on_two_groups(made: Program) -> list[fx.Node]:
    return [made.gather(shard, group) for shard, group in zip(made.shards("pq"), "07", strict=True)]


def of_two_dtypes(made: Program) -> list[fx.Node]:
    return [made.gather(*made.shards("p")), made.gather(*made.shards("q", dtype=torch.bfloat16))]


def in_two_directions(made: Program) -> list[fx.Node]:
    p, q, x, y = *made.shards("pq"), *made.fulls("xy")
    forward = [made.gather(p), made.reduce(x)]
    made.backward = True
    return [*forward, made.gather(q), made.reduce(y)]


def reduced_in_two_ways(made: Program) -> list[fx.Node]:
    return [made.reduce(x, op) for x, op in zip(made.fulls("xy"), ("avg", "sum"), strict=True)]


SPLITS: dict[Callable[[Program], list[fx.Node]], list[str]] = {
    on_two_groups: [
        "it runs on process group 0, others of its entry on 7, and a launch has one",
        "it runs on process group 7, others of its entry on 0, and a launch has one",
    ],
    of_two_dtypes: [
        "its dtype is float32, that of others of its entry bfloat16",
        "its dtype is bfloat16, that of others of its entry float32",
    ],
    in_two_directions: [
        "in backward it is gathered anew: one launch for both would keep it gathered in between",
        "in backward there are reductions too: one launch for both would hold back the earlier",
        "in forward it is gathered anew: one launch for both would keep it gathered in between",
        "in forward there are reductions too: one launch for both would hold back the earlier",
    ],
    reduced_in_two_ways: [
        "it reduces by avg, others of its entry by sum, and a launch has one reduction",
        "it reduces by sum, others of its entry by avg, and a launch has one reduction",
    ],
}


@pytest.mark.parametrize("build", SPLITS)
def test_what_two_launches_differ_in_is_said_of_both(build: Callable[[Program], list[fx.Node]]) -> None:
    made = Program(RANKS)
    assert said(run_pass(made.returns(*build(made)).graph, ["a"])) == [[line] for line in SPLITS[build]]


def split_of(build: Callable[[Program], list[fx.Node]]) -> tuple[PassReport, Any]:
    made = Program(RANKS)
    report = run_pass(made.returns(*build(made)).graph, ["a"])
    (split,) = report.buckets[1].splits
    return report, split


def test_process_groups_are_said_by_mesh_dimension_where_it_is_known() -> None:
    report, split = split_of(on_two_groups)
    dims = {"0": "dp_shard", "7": "tp"}
    assert sentence(split, "all_gather", dims).startswith("it runs on process group tp, others of its entry on dp_shard")
    assert report.to_dict(dims)["buckets"][1]["group"] == "tp"
    assert remedy(split, "all_gather") == "shard both over the same mesh dimension"


def test_two_dtypes_have_the_way_out_that_the_kind_has() -> None:
    _, split = split_of(of_two_dtypes)
    assert remedy(split, "all_gather").startswith('set bucket.dtypes = "mixed"')
    assert remedy(split, "reduce_scatter").startswith("set parallel.reduce_dtype")


def test_a_bucket_that_nothing_parted_has_no_reason() -> None:
    report = run_pass(chain().graph, ["a", "b", "c"])
    assert [(bucket.launches_before, bucket.launches_after, bucket.splits) for bucket in report.buckets] == [(2, 1, ())] * 3


def test_merging_that_is_off_is_the_reason() -> None:
    assert said(run_pass(gathering("pq"), ["a"], enabled=False)) == [["merging is off (bucket.enabled = false)"]] * 2
    assert said(run_pass(gathering("p"), ["a"], enabled=False)) == [[]], "alone it was apart from nothing"


def test_two_devices_are_said() -> None:
    graph = gathering("pq")
    first, second = by_module(graph, [("a", ["a"])], None).planned
    found = grouping_of(order_of(graph), [first, replace(second, device="cuda:1")], Bucketer(Bucket()), ["a"])
    ((_, _), (_, (split,))) = found
    assert sentence(split, "all_gather") == "it is on cuda:1, others of its entry on cpu"


def test_a_launch_that_carries_several_dtypes_already_is_said() -> None:
    made = Program(RANKS)
    shards = [*made.shards("p"), *made.shards("q", dtype=torch.bfloat16)]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, shards, RANKS, "0")
    waits = [made.wait(made.part(launch, i)) for i in range(2)]
    report = run_pass(made.returns(*waits, made.gather(*made.shards("r"))).graph, ["a"])
    assert "its launch carries several dtypes already, and stays as it was" in said(report)[0]
    assert report.buckets[0].launches_before == 1
    assert report.buckets[0].dtype == "bfloat16+float32"


def test_a_bucket_of_an_earlier_run_is_said() -> None:
    graph = gathering("pq")
    run_pass(graph, ["a"], cap_mb=(GATHERED / MB,))
    assert said(run_pass(graph, ["a"])) == [["what an earlier run made a bucket stays as it is"]] * 2


@pytest.mark.parametrize(
    ("options", "members", "sentences"),
    [
        (
            {"cap_mb": (2 * GATHERED / MB,)},
            [("p", "q"), ("r", "s")],
            ["cap_mb = 0.000183105 (192 bytes) is reached: 192 bytes, and r would add 96"] * 2,
        ),
        (
            {"cap_mb": (GATHERED / MB / 2,)},
            [("p",), ("q",), ("r",), ("s",)],
            [f"{name} alone has 96 bytes, above cap_mb = 4.57764e-05 (48 bytes)" for name in "pqrs"],
        ),
        (
            {"by": "size", "cap_mb": (GATHERED / MB, 2 * GATHERED / MB)},
            [("p",), ("q", "r"), ("s",)],
            [
                "cap_mb = 9.15527e-05 (96 bytes) is reached: 96 bytes, and q would add 96",
                *["cap_mb = 0.000183105 (192 bytes) is reached: 192 bytes, and s would add 96"] * 2,
            ],
        ),
    ],
    ids=["reached", "a member above it", "by size"],
)
def test_a_cap_is_said_with_its_figures(options: dict[str, Any], members: list[tuple[str]], sentences: list[str]) -> None:
    report = run_pass(gathering("pqrs"), ["a"], **options)
    assert [bucket.members for bucket in report.buckets] == members
    assert said(report) == [[line] for line in sentences]


def test_a_cap_that_would_be_enough_is_said() -> None:
    report = run_pass(gathering("pqr"), ["a"], cap_mb=(2 * GATHERED / MB,))
    assert remedy(report.buckets[0].splits[0], "all_gather") == (
        "set bucket.cap_mb to at least 0.001 for that one, or to 0 for no cap"
    )


def test_a_cap_is_said_rounded_up_however_large_it_is() -> None:
    split = SplitReason("cap", bytes=round(12345.6783 * MB), more=1, cap_mb=12345.0)
    assert remedy(split, "all_gather") == "set bucket.cap_mb to at least 12345.679 for that one, or to 0 for no cap"


@pytest.mark.parametrize("links", [2, 3])
def test_of_a_chain_each_part_names_the_member_before_it(links: int) -> None:
    made = Program(RANKS)
    x, found = made.given("x", 4**4, COLUMNS), []
    for _ in range(links):
        found.append(made.reduce(x))
        x = made.neg(made.neg(found[-1]))
    report = run_pass(made.returns(*found, made.reduce(*made.fulls("y"))).graph, ["a"])
    needs = [
        "output 1 needs the result of output 0",
        *[f"output {i} needs the result of output {i - 1}" for i in range(1, links)],
    ]
    assert said(report) == [[f"{one}, so that one launch cannot have both"] for one in needs]


@pytest.mark.parametrize("larger", ["ac", "bd"])
def test_of_a_circle_the_larger_bucket_stays_whole_and_the_other_names_it(larger: str) -> None:
    made = Program(RANKS)
    found = []
    for x, modules in zip(made.shards("xyuv", 64, COLUMNS), ("ab", "ba", "cd", "dc"), strict=True):
        for made.module in modules:
            x = made.neg(made.reduce(x))
            found.append(x)
    for made.module in larger:
        found.append(made.reduce(made.given(f"more_{made.module}", 8, COLUMNS)))
    report = run_pass(made.returns(*found).graph, ["a", "b", "c", "d"])
    parted = [(bucket.entry, line) for bucket, line in zip(report.buckets, said(report), strict=True) if line]
    assert sorted(parted) == [
        (smaller, [f"as one launch it and the reduce_scatter of {whole} would wait for each other in a circle"])
        for smaller, whole in zip("bd" if larger == "ac" else "ac", larger, strict=True)
        for _ in range(2)
    ]
