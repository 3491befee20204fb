"""What is no verdict on a mutant is counted apart: ranks that may only have been slow, and checks that break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.checks.registry import Check
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.mutate.judge import Judge
from pytest_fxbucket.mutate.score import Judged, MutationScore, sums, undecided_lines
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.plan.schema_checks import Checks
from pytest_fxbucket.ranks.failure import RankState, failure_of
from pytest_fxbucket.ranks.flight_recorder import RankPosition, RecordedGroup, RecordedLaunch
from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan

ONLY = Checks(audit=False, golden=False, collectives=False, same=False, bitwise=False, eager=False)
LAUNCH = RecordedLaunch(0, 0, 1, True, "all_gather", "float32", 8)
WAITS = RankPosition("step 1", LAUNCH, "waits for", (RecordedGroup((0, 1), 1, 1),), (LAUNCH,))
BUSY = RankPosition("step 1", groups=(RecordedGroup((0, 1), 0, 0),))


class BrokenPools(Pools):
    """Whose ranks raise."""

    def __init__(self, error: RankError) -> None:
        super().__init__()
        self.error = error

    def get(self, *_: object, **__: object) -> Any:
        return self

    def run(self, *_: object, **__: object) -> list[Any]:
        raise self.error


@pytest.fixture(scope="module", name="plan")
def _plan(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> BrokenPlan:
    return BrokenPlan(f"{ROOT}/fixtures/plans/uneven.toml", pools, tmp_path_factory.mktemp("undecided"))


def judged(plan: BrokenPlan, checks: Checks, error: RankError) -> Judged:
    context = plan.run._context("mutation")
    context = replace(context, plan=replace(context.plan, checks=checks), pools=BrokenPools(error))
    return Judge(context).judged(plan.mutants("compute_doubled")[0])


def late(other: RankState) -> RankError:
    """That of two ranks, of which the first waits for the second."""
    return failure_of([RankState(0, where=WAITS, process="S"), other], task="bitwise", timed_out_s=30)


def test_ranks_that_may_be_slow_find_nothing(plan: BrokenPlan) -> None:
    one = judged(plan, replace(ONLY, bitwise=True), late(RankState(1, where=BUSY, process="R")))
    assert (one.fate, one.found, one.equal) == ("undecided", {}, None)
    (said,) = undecided_lines(one)
    assert (
        f"{one.mutant.name} is undecided by bitwise: 2 of 2 ranks did not answer within 30 s; rank 1: is still running" in said
    )
    score = MutationScore([one], 1)
    assert sums(score).startswith("found 0 of 0 mutants (100.0 %); ")
    assert sums(score).endswith(" alone find 0 of 0; 1 undecided, not counted")


def twice_on_the_last(gm: fx.GraphModule, plans: Sequence[object]) -> fx.GraphModule:
    """Our pass; the last rank computes each product twice."""
    gm = manual_overlap_bucketing(gm, plans)
    if dist.get_rank() == dist.get_world_size() - 1:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with gm.graph.inserting_after(node):
                gm.graph.node_copy(node)
    return gm


def test_what_is_slower_on_the_last_rank_alone_is_no_other_order_of_the_same(plan: BrokenPlan) -> None:
    judge = Judge(plan.run._context("mutation"))
    slow = plan.world.by_pass("suites.mutate.test_undecided:twice_on_the_last")
    first, *_, last = judge._simulated(slow)
    assert last[0] > first[0]
    assert [one[0] for one in judge._simulated(plan.world)] == [first[0]] * plan.world.size


def test_ranks_that_hang_for_a_reason_find_it(plan: BrokenPlan) -> None:
    one = judged(plan, replace(ONLY, bitwise=True), late(RankState(1, "returned", where=BUSY)))
    assert one.fate == "found"
    assert "rank 1 never launched collective 1" in one.found["bitwise"]


def test_ranks_that_cannot_be_had_find_nothing(plan: BrokenPlan) -> None:
    one = judged(plan, replace(ONLY, eager=True), RankError("no memory"))
    assert (one.fate, one.undecided) == ("undecided", {"bitwise": "no memory", "eager": "no memory"})


def test_a_check_that_breaks_finds_nothing_and_others_still_do(plan: BrokenPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise KeyError("not here")

    run = Check.run
    monkeypatch.setattr(Check, "run", lambda self, context: breaks() if self.name == "audit" else run(self, context))
    one = judged(plan, replace(ONLY, audit=True), RankError("no memory"))
    assert (one.fate, one.undecided["audit"]) == ("undecided", "raised KeyError: 'not here'")
    one = judged(plan, replace(ONLY, audit=True, same=True), RankError("no memory"))
    assert one.fate == "found"
    assert list(one.found) == ["same"]
    assert "audit" in one.undecided
