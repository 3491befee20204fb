"""Buckets that stay hidden: what is merged, and what would be exposed and so is not."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_size
from suites.benchmarks.simulator import RANKS
from suites.graph.handmade import Handmade, aten
from suites.passes.auto.test_by_itself import PLAIN

LATENCY, PER_BYTE = 0.2, 1e-4
"""Seconds of a collective."""


def weights_of(sizes: list[int], products: int = 2) -> fx.Graph:
    """Layers of as many gathered weights as ``sizes`` has, of so many rows; ``products`` of a second each in each layer."""
    made = Handmade(RANKS)
    x = made.batch(16, 16)
    for layer in range(3):
        for number, rows in enumerate(sizes):
            gathered = made.gathered(made.param(f"layers.{layer}.w{number}", rows, 16))
            x = made.call(aten.add.Tensor, x, made.call(aten.narrow.default, gathered, 0, 0, 16))
        for _ in range(products):
            x = made.call(aten.mm.default, x, x)
    made.returns(made.call(aten.sum.default, x), "loss")
    return made.finish()


def estimates(latency: float = LATENCY) -> Estimates:
    def seconds(node: fx.Node) -> float:
        launch = read_launch(node)
        if launch is not None:
            return latency + PER_BYTE * node.meta["val"].numel() * 4
        return 1.0 if operator_name(node) == "aten::mm" else 0.0

    return Estimates(seconds, PLAIN)


def bucketed(graph: fx.Graph, latency: float = LATENCY, **options: object) -> PassReport:
    found = ManualPass.of(by="overlap", schedule="auto", **options)
    return found.run(graph, by_size(graph), estimates(latency))


def sizes(report: PassReport) -> list[int]:
    return [bucket.launches_before for bucket in report.buckets]


def test_what_is_needed_together_is_merged_and_hidden() -> None:
    report = bucketed(weights_of([2, 4, 8]))
    assert sizes(report) == [3, 6], "the first layer's, which is exposed; those of the others, which hide behind it"
    assert report.schedule is not None
    assert report.schedule.hidden == 1


def test_what_would_be_exposed_as_one_launch_is_not_merged() -> None:
    """Two of 3.5 seconds in flight hide behind four products each, not behind the first four together."""
    assert sizes(bucketed(weights_of([64], products=4))) == [1, 1, 1]
    assert sizes(bucketed(weights_of([8], products=8))) == [1, 2]


def test_where_latency_is_little_of_a_flight_nothing_is_won() -> None:
    assert sizes(bucketed(weights_of([64, 96]), latency=0.0)) == [1] * 6
    assert len(sizes(bucketed(weights_of([64, 96]), latency=1.0))) < 6


@pytest.mark.parametrize("rows", [[2, 4, 8], [8, 8, 16], [4, 4], [64, 2]])
@pytest.mark.parametrize("products", [1, 2, 5])
@pytest.mark.parametrize("latency", [0.05, 0.5])
def test_no_more_is_exposed_than_without_merging(rows: list[int], products: int, latency: float) -> None:
    merged, apart = (bucketed(weights_of(rows, products), latency, enabled=enabled).schedule for enabled in (True, False))
    assert merged is not None
    assert apart is not None
    assert merged.exposed <= apart.exposed + 1e-6
    assert merged.collectives <= apart.collectives


@pytest.mark.parametrize("cap", [9000, 13_000])
def test_a_cap_holds(cap: int) -> None:
    report = bucketed(weights_of([8, 8, 16]), cap_mb=(cap / (1 << 20),))
    assert max(bucket.bytes for bucket in report.buckets) <= cap
    assert len(report.buckets) < 9


def test_what_is_left_apart_says_why() -> None:
    report = bucketed(weights_of([2, 4, 8]))
    (split,) = {split.reason for bucket in report.buckets for split in bucket.splits}
    assert split == "overlap"


def sums_and_averages() -> fx.Graph:
    """Gradients of ten products, two of them summed, then two averaged that are needed at the same time."""
    made, got = Handmade(2), []
    y = made.batch(16, 16)
    for number in range(1, 11):
        y = made.call(aten.mm.default, y, y)
        if number in (1, 4):
            got.append(made.wait(made.reduce(y, "sum")))
        if number == 6:
            got += [made.wait(made.reduce(one, "avg")) for one in (made.call(aten.clone.default, y), y)]
    total = got[0]
    for one in got[1:]:
        total = made.call(aten.add.Tensor, total, one)
    for one in got:
        made.returns(one, "grad", "w")
    made.returns(made.call(aten.mm.default, total, y), "loss")
    return made.finish()


def test_what_is_joined_to_one_of_the_same_deadline_counts_for_those_before_it() -> None:
    def seconds(node: fx.Node) -> float:
        if read_launch(node) is not None:
            return 0.2 + 1.8 * float(node.meta["val"].numel()) / 128
        return {"aten::mm": 1.0, "aten::clone": 0.05}.get(operator_name(node), 0.0)

    graph = sums_and_averages()
    report = ManualPass.of(by="overlap", schedule="auto").run(graph, by_size(graph), Estimates(seconds, PLAIN))
    assert report.schedule is not None
    assert report.schedule.exposed == 0
    assert sizes(report) == [1, 1, 2], "the sums as one launch would have to begin before the second of them is there"
