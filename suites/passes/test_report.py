"""The report is never believed: what it says is what the graph has. And merged nodes say where they are from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from pytest_fxbucket.graph.buckets import gathered_lives, peak_bytes
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_module
from suites.passes.bucketing import Outcome, as_report, passed
from suites.passes.programs import chain

OPTIONS: dict[str, dict[str, Any]] = {
    "three ahead": {"prefetch": 3},
    "nothing moved": {"prefetch": 0, "defer_reduce": False},
    "capped": {"cap_mb": (0.02,)},
    "by size": {"by": "size", "entries": (), "cap_mb": (0.05,)},
    "not merged": {"enabled": False},
    "execution": {"layout": "execution"},
    "kept": {"reshard_after_forward": False},
    "own group": {"gather_group": "own"},
    "order kept": {"insert_overlap_deps": True},
    "by hand": {"launch_at": {"forward": {"norm": "tok_embeddings"}}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_said_of_each_bucket_and_of_all_is_read_off_the_graph(options: str) -> None:
    outcome = passed("tied", **OPTIONS[options])
    report, after, totals = outcome.report, outcome.after.buckets, outcome.report.totals
    plain = _without_order(outcome)
    derived = [as_report(plain, bucket) for bucket in plain.after.buckets]
    assert [replace(bucket, splits=()) for bucket in report.buckets] == derived
    assert any(bucket.overlap_nodes for bucket in derived) == (options != "nothing moved")
    assert (totals.buckets, totals.launches_after) == (len(after), len(after))
    assert totals.launches_before == len(outcome.before.buckets)
    assert totals.members == sum(len(bucket.members) for bucket in after)
    for (direction, kind), own in report.totals_by_kind.items():
        same = [bucket for bucket in after if (bucket.direction, bucket.kind) == (direction, kind)]
        assert (own.buckets, own.bytes) == (len(same), sum(bucket.bytes for bucket in same))
    assert totals.hidden == sum(bucket.overlap_nodes > 0 for bucket in report.buckets)
    peaks = peak_bytes(gathered_lives(outcome.before)), peak_bytes(gathered_lives(outcome.after))
    assert (report.gathered_before, report.gathered_after) == peaks


def test_each_part_of_an_entry_says_what_parted_it() -> None:
    report = passed("tied", **OPTIONS["capped"]).report
    families: dict[tuple[str, str, str], list[set[str]]] = {}
    for bucket in report.buckets:
        reasons = {split.reason for split in bucket.splits} - {"direction"}
        families.setdefault((bucket.entry, bucket.direction, bucket.kind), []).append(reasons)
    assert max(map(len, families.values())) > 2
    for parts in families.values():
        assert all(bool(reasons) == (len(parts) > 1) for reasons in parts)


def test_the_report_is_plain_data_with_its_sums_and_sentences() -> None:
    data = json.loads(json.dumps(passed("tied", **OPTIONS["capped"]).report.to_dict()))
    assert data["totals"]["buckets"] == len(data["buckets"])
    assert sum(own["launches_before"] for own in data["totals_by_kind"]) == data["totals"]["launches_before"]
    splits = [split for bucket in data["buckets"] for split in bucket["splits"]]
    assert all(split["why"] and split["change"] for split in splits)


@pytest.mark.parametrize("case", ["two_dtypes", "tied"])
@pytest.mark.parametrize("options", [{}, {"insert_overlap_deps": True, "prefetch": 2}, {"dtypes": "mixed"}])
def test_every_node_that_is_new_names_its_entry_and_sources(case: str, options: dict[str, Any]) -> None:
    outcome = passed(case, param_dtype="bfloat16", **options)
    before = {node.name for node in outcome.step.graphs["joint"].graph.nodes}
    new = [node for node in outcome.graph.nodes if node.name not in before]
    launches = {bucket.node for bucket in outcome.before.buckets}
    entries = {bucket.entry for bucket in outcome.report.buckets}
    assert len(new) > 20
    for node in new:
        assert node.meta["fxbucket_entry"] in entries
        assert node.meta["fxbucket_sources"]
        assert set(node.meta["fxbucket_launches"]) <= launches
        assert_says_all_members(node)


@pytest.mark.parametrize("launch_at", [{}, {"forward": {"c": "a"}}])
def test_what_keeps_the_order_names_an_entry_and_all_members(launch_at: dict[str, dict[str, str]]) -> None:
    """In this graph every node has a module stack that could be copied; single launches are among the pinned ones."""
    gm = chain(("a", "b", "c"), backward=True)
    before = set(gm.graph.nodes)
    targets = by_module(gm.graph, [(entry, [entry]) for entry in "abc"], None)
    single = tuple(target for target in targets.planned if "scale" not in target.fqns[0])
    options = {"insert_overlap_deps": True, "launch_at": launch_at}
    ManualPass.of(**options).run(gm.graph, replace(targets, planned=single))
    new = [node for node in gm.graph.nodes if node not in before]
    assert any("after" in str(node.target) for node in new)
    for node in new:
        assert node.meta["fxbucket_entry"] in ("a", "b", "c")
        assert node.meta["fxbucket_sources"]
        assert node.meta["fxbucket_launches"]
        assert_says_all_members(node)


def assert_says_all_members(node: fx.Node) -> None:
    """Module and line have room for one member; what tells of all has all, and autograd's number is nobody's."""
    assert tuple(source.name for source in node.meta["from_node"]) == node.meta["fxbucket_launches"]
    assert "seq_nr" not in node.meta


def _without_order(outcome: Outcome) -> Outcome:
    """The reading is of the graph without what keeps the order, so compute is counted there as well."""
    from pytest_fxbucket.passes.keep_order import without_kept_order

    graph: fx.Graph = without_kept_order(outcome.graph)
    bucketed = replace(outcome.passed.bucketed, graph=graph)
    return replace(outcome, passed=replace(outcome.passed, bucketed=bucketed))
