"""Plans of real models scored: as the command simulate has them, captured once where they trace the same, within memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import Cluster, cluster_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.of_plan import in_schedule, simulated_ranks, unbucketed
from pytest_fxbucket.step.portable import digest, encode
from pytest_fxbucket.tune.moves import PlanMove
from pytest_fxbucket.tune.score import PlanSimulator
from pytest_fxbucket.tune.search import search
from suites.tune.small_plans import SMALL, plan_of
from suites.tune.small_plans import STARS as OF_FOUR

STARS = OF_FOUR.replace(*SMALL)

ADAMW = '[[optimizer]]\nfactory = "torch.optim:AdamW"\nargs = { lr = 0.1 }\n'
STAGED = '[pipeline]\ncuts = ["layers.0"]\nschedule = "GPipe"\n[step]\nmicrobatches = 2\n'

TIED = """
[model]
factory = "fixtures.models.gpt:build"
args = { layers = 2, tied = true }
batch = "fixtures.models.gpt:batch"
loss = "fixtures.models.gpt:loss"
[parallel]
dp_shard = 2
[bucket]
plan = ["tokens+positions+output+norm", "layers.1", "layers.0"]
[cluster]
preset = "cpu-gloo"
"""


def on(plan: Plan) -> Cluster:
    found = cluster_of(plan)
    assert found is not None
    return found


def scorer_of(plan: Plan) -> tuple[PlanSimulator, list[str]]:
    said: list[str] = []
    return PlanSimulator(plan, on(plan), said.append), said


def anew(plan: Plan) -> PlanOnMesh:
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def traced(plan: Plan) -> str:
    (graph,) = anew(plan).step(0).graphs.values()
    return digest(encode(graph.graph, graph))


class OfPrefetch(PlanSimulator):
    """Knows no other moves."""

    def moves(self, plan: Plan) -> Sequence[PlanMove]:
        return [move for move in super().moves(plan) if "prefetch" in move.says]


def test_gathers_that_are_never_ahead_are_found_to_be_where_memory_does_not_hold_the_search_back() -> None:
    plan = plan_of(STARS + "[overlap]\nprefetch = 0\n")
    scorer = OfPrefetch(plan, on(plan), lambda _: None)
    found, world = search(plan, scorer, inf), anew(plan)
    (as_it_is,) = simulated_ranks(world, on(plan))
    (proposed,) = simulated_ranks(world.under(found.plan), on(plan))
    assert found.first.seconds == as_it_is.timeline.seconds
    assert found.score.seconds == proposed.timeline.seconds < found.first.seconds
    assert (found.score.peak_bytes, found.score.exposed) == (proposed.timeline.peak_bytes, proposed.timeline.exposed)
    assert found.plan.overlap.prefetch > 0
    assert sum(one.gain for one in found.changes) == pytest.approx(found.first.seconds - found.score.seconds)
    assert all(one.gain >= 0 for one in found.changes)
    assert found.first.reasons["launched too late"] > 0
    assert sum(found.first.reasons.values()) == pytest.approx(found.first.exposed)
    assert found.score.peak_bytes > found.first.peak_bytes
    held = search(plan, scorer, found.first.peak_bytes)
    assert (held.plan, held.changes, held.tried) == (plan, [], 3)


@pytest.mark.parametrize("more", ["", ADAMW + 'groups = "entry"\n'], ids=["gradients", "groups"])
def test_plans_that_are_taken_to_trace_the_same_do(more: str) -> None:
    plan = plan_of(STARS + more)
    scorer, _ = scorer_of(plan)
    scorer.score(plan)
    first, others = traced(plan), []
    for move in scorer.moves(plan):
        if scorer.effort(move.plan) > 10:
            others.append(move.says)
        elif "plan" in move.says:
            assert traced(move.plan) == first, move.says
    together = "[bucket] plan has layers.[0-1] in entries of 2"
    last = ['[bucket] plan has "norm+output" apart', '[bucket] plan has "layers.1+norm+output" as one entry']
    assert together in [move.says for move in scorer.moves(plan)], "stars are written out by the model"
    assert others == last if "entry" not in more else {*last, together} <= set(others)


def test_a_plan_that_traces_another_step_is_captured_and_scored_as_itself() -> None:
    plan = plan_of(STARS)
    parted = replace(
        plan, bucket=replace(plan.bucket, plan=plan_of(STARS.replace("norm+output", 'norm", "output')).bucket.plan)
    )
    scorer, said = scorer_of(plan)
    first, found = scorer.score(plan), scorer.score(parted)
    assert found != first
    assert found.seconds == simulated_ranks(anew(parted), on(plan))[0].timeline.seconds
    assert scorer.score(plan) == first
    assert said.count("tracing the step as rank 0 of 4") == 2


def test_a_plan_whose_parameters_are_tied_is_captured_anew_where_it_traces_another_step() -> None:
    """Selectors that are one entry, since they share a parameter, cannot be entries of their own."""
    plan = plan_of(TIED)
    merged = plan_of(TIED.replace('norm", "layers.1"', 'norm+layers.1"'))
    assert merged != plan
    scorer, _ = scorer_of(plan)
    scorer.score(plan)
    found = scorer.score(merged)
    timeline = simulated_ranks(anew(merged), on(plan))[0].timeline
    assert (found.seconds, found.peak_bytes) == (timeline.seconds, timeline.peak_bytes)


def test_stages_are_scored_in_the_order_of_their_schedule() -> None:
    plan = plan_of(STARS.replace("dp_shard = 4", "dp_shard = 2\npp = 2") + STAGED)
    scorer, _ = scorer_of(plan)
    found, world = scorer.score(plan), scorer._first
    assert world is not None
    scheduled = in_schedule(world, on(plan))
    assert scheduled is not None
    peaks = [one.timeline.peak_bytes for one in simulated_ranks(world, on(plan), believed=True)]
    assert (found.seconds, found.peak_bytes) == (scheduled.seconds, max(peaks))


def test_the_limit_is_the_checks_or_the_clusters() -> None:
    plan = plan_of(STARS)
    cluster = on(plan)
    assert scorer_of(plan)[0].limit() == cluster.memory
    for most in (3, 300):
        checked = plan_of(STARS + f"[checks]\nmemory = {{ peak_max_gb = {most} }}\n")
        assert scorer_of(checked)[0].limit() == most * 2**30
    increased = plan_of(STARS + "[checks]\nmemory = { peak_max_gb = 3, increase_max = 0.5 }\n")
    scorer, _ = scorer_of(increased)
    most = scorer.limit()
    assert scorer._first is not None
    assert most == 1.5 * unbucketed(scorer._first, 0, cluster).peak_bytes
