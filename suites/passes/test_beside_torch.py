"""Our pass and torch's on the same graphs: the same where both are right, and the list of graphs where torch's is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.torch_pass import OPERATORS, torch_manual_overlap_bucketing
from pytest_fxbucket.fuzz.inputs_and_outputs import graph_inputs
from pytest_fxbucket.fuzz.on_ranks import JOB, LIMIT_S
from pytest_fxbucket.fuzz.program import copied, fake_groups
from pytest_fxbucket.fuzz.rank_job import FuzzCase
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.plan import PlanError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import digest, encode, encode_module
from suites.passes.bucketing import world_of
from suites.passes.partings import PARTINGS, VERSIONS, Parting, Torchs, table
from suites.passes.programs import launches
from suites.passes.torch_graphs import gathers

VERSION = ".".join(torch.__version__.split(".")[:2])
of_a_version_in_the_table = pytest.mark.skipif(
    VERSION not in VERSIONS, reason=f"the page says what torch's pass does in {' and '.join(VERSIONS)}, not in {VERSION}"
)
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "beside-torch.md"
EACH = pytest.mark.parametrize("parting", PARTINGS, ids=lambda parting: parting.name.replace("`", ""))


def run(function: Any, parting: Parting, graph_module: fx.GraphModule, rank: int = 0) -> fx.GraphModule:
    """A copy of ``graph_module`` through a pass, with its groups in place."""
    program = parting.program()
    result = copied(graph_module)
    with fake_groups(program.world, program.groups, rank):
        passed: fx.GraphModule = function(result, parting.plan, bucket_mode=parting.mode)
    return passed


def graph_of(parting: Parting) -> fx.GraphModule:
    program = parting.program()
    return program.returns(*parting.build(program))


def differences(pools: Pools, parting: Parting, before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    """What differs on ranks, a sentence each."""
    program = parting.program()
    passed = encode(after.graph, after, (OPERATORS,))
    case = FuzzCase(encode_module(before), (passed,), tuple(graph_inputs(before)), 0, program.groups)
    results = pools.get(program.world).run(JOB, [case] * program.world, timeout_s=LIMIT_S)
    return [text for result in results for text in cast("list[list[str]]", result)[0]]


@of_a_version_in_the_table
@EACH
def test_torchs_pass_does_what_readme_says(pools: Pools, parting: Parting) -> None:
    assert what_torchs_does(pools, parting) == parting.of(VERSION)


def what_torchs_does(pools: Pools, parting: Parting) -> Torchs:
    before = graph_of(parting)
    try:
        after = run(torch_manual_overlap_bucketing, parting, before)
    except Exception:
        return "raises"
    if str(after.graph) == str(before.graph):
        return "does nothing"
    if differences(pools, parting, before, after):
        return "other values"
    if not parting.launches:  # a plan that is wrong
        default = replace(parting, mode="default")
        assert after.code == run(torch_manual_overlap_bucketing, default, before).code
        return "takes it for the default"
    if len(launches(after.graph)) == len(launches(before.graph)) > len(parting.launches):
        return "merges nothing"
    if len(launches(after.graph)) < len(parting.launches):
        return "one bucket for both directions"
    return "right"


@EACH
def test_ours_is_right_there(pools: Pools, parting: Parting) -> None:
    before = graph_of(parting)
    if not parting.launches:
        with pytest.raises(PlanError):
            run(manual_overlap_bucketing, parting, before)
        return
    after = run(manual_overlap_bucketing, parting, before)

    assert tuple(launches(after.graph)) == parting.launches
    assert differences(pools, parting, before, after) == []


def test_torchs_pass_writes_another_graph_on_every_rank_and_ours_the_same() -> None:
    parting = Parting("", "raises", "", gathers)
    before = graph_of(parting)

    assert len({digest_on(torch_manual_overlap_bucketing, parting, before, rank) for rank in range(2)}) == 2
    assert len({digest_on(manual_overlap_bucketing, parting, before, rank) for rank in range(2)}) == 1


def digest_on(function: Any, parting: Parting, before: fx.GraphModule, rank: int) -> str:
    after = run(function, parting, before, rank)
    return digest(encode(after.graph, after))


@pytest.mark.parametrize("case", ["tied", "linears", "normed", "uneven", "late", "twice"])
def test_where_both_are_right_buckets_and_order_are_the_same(case: str) -> None:
    ours = world_of(case, reshard_after_forward=False)  # otherwise torch's merges both directions
    schedules = [schedule(world.passed(0)["joint"].reading) for world in (ours, ours.by_pass("torch"))]

    assert schedules[0] == schedules[1]
    assert len(schedules[0]) < len(schedule(ours.reading(0)["joint"]))


def schedule(reading: GraphAnalysis) -> list[tuple[str, str, frozenset[str]]]:
    """(launch or wait, kind, members) in order."""
    places = {
        place: (what, bucket.kind, frozenset(bucket.fqns))
        for bucket in reading.buckets
        for what, place in (("launch", bucket.launch), ("wait", bucket.wait))
        if place is not None
    }
    return [places[place] for place in sorted(places)]


def test_the_page_shows_the_list() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
