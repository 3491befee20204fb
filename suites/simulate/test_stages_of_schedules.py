"""A step in stages: equal ones with free transfers idle as the table says; what gathers and transfers add is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.pipeline.played import bubble, bubbles_of, done_by
from pytest_fxbucket.pipeline.schedules import COSTS, table_of
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES
from pytest_fxbucket.simulate.stages import StagedTimeline, simulate_stages
from pytest_fxbucket.step.roles import Phase
from suites.simulate.staged_graphs import place, two_stages

CLUSTER = Cluster(
    name="c",
    flops={"float32": 1e12},
    memory_bandwidth=1e9,
    memory=1e12,
    devices_per_node=8,
    within=Link(1e9, 0.0),
    between=Link(1e6, 0.0),
)
"""Within a node a byte takes a nanosecond."""


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_who_begins_later_idles_as_much(name: str, microbatches: int) -> None:
    each = {"one": 1, "two": 2, "several": 2}[SCHEDULES[name]]
    table = table_of(name, 4 * each, 4, 8 if name == "DualPipeV" else microbatches)
    done = done_by(table, lambda action: float(COSTS[action.kind]), lambda sender, receiver: 0.0, [3.0] * 4)
    bubbles = bubbles_of(done, 4)
    assert sum(bubbles) / 4 == pytest.approx(bubble(table), abs=1e-12)
    assert min(one.start for one in done) == 3.0
    assert all(0 <= one < 1 for one in bubbles)


def simulated(phases: list[dict[Phase, float]], crossing_bytes: int, cluster: Cluster = CLUSTER) -> StagedTimeline:
    how = two_stages("GPipe", 2, crossing_bytes)
    made = [place(rank, own, how) for rank, own in enumerate(phases)]
    # Each rank has a model of its own, which knows no node of another.
    return simulate_stages([step for step, _ in made], cluster, lambda step: made[step.rank][1].__getitem__)


def stage(number: int, forward: float = 10, backward: float = 20) -> dict[Phase, float]:
    return {f"stage {number} forward": forward, f"stage {number} backward": backward}


PARTS = {"forward": 10, "input": 20, "weight": 5}


def starts(timeline: StagedTimeline) -> dict[str, float]:
    return {f"{one.stage}{one.kind}{one.microbatch}": round(one.start * 1e6, 6) for one in timeline.done}


def test_transfers_hold_up_the_next_stage() -> None:
    timeline = simulated([stage(0), stage(1)], 5_000)  # 5 us
    assert starts(timeline) == {
        **{"0F0": 0, "0F1": 10, "0B0": 60, "0B1": 80},
        **{"1F0": 15, "1F1": 25, "1B0": 35, "1B1": 55},
    }
    assert timeline.seconds == pytest.approx(100e-6)
    assert timeline.bubbles == pytest.approx((0.4, 0.4))
    assert timeline.bubble == pytest.approx(0.4)


def test_a_whole_backward_takes_as_long_as_its_two_parts() -> None:
    """DualPipeV runs some backwards whole, of stages that are traced in two parts."""
    stages = [0, 3], [1, 2]
    how = replace(two_stages("DualPipeV", 4, 0), pp_places=(0, 1, 1, 0), forward=((),) * 3, backward=((),) * 3)
    made = [
        place(rank, {f"stage {number} {work}": took for number in own for work, took in PARTS.items()}, how)
        for rank, own in enumerate(stages)
    ]
    timeline = simulate_stages([step for step, _ in made], CLUSTER, lambda step: made[step.rank][1].__getitem__)
    assert {(one.kind, round(1e6 * (one.end - one.start))) for one in timeline.done} == {
        ("F", 10),
        ("I", 20),
        ("W", 5),
        ("B", 25),
    }


def test_a_link_carries_one_after_the_other() -> None:
    assert starts(simulated([stage(0), stage(1)], 15_000))["1F1"] == 40


def test_ranks_of_other_nodes_are_further_away() -> None:
    apart = replace(CLUSTER, devices_per_node=1)
    assert starts(simulated([stage(0), stage(1)], 100, apart))["1F0"] == 110


def test_gathers_come_first_reductions_and_updates_last_and_ties_when_all_are_reduced() -> None:
    around: dict[Phase, float] = {"stage 0 unshard": 7, "stage 0 reduce": 3, "ties": 2, "update": 4}
    other: dict[Phase, float] = {"stage 1 unshard": 1, "stage 1 reduce": 40, "ties": 2}
    timeline = simulated([stage(0) | around, stage(1) | other], 5_000)
    assert starts(timeline)["0F0"] == 7
    assert starts(timeline)["1F0"] == 22
    assert timeline.seconds == pytest.approx((82 + 40 + 2 + 4) * 1e-6)  # the second stage reduces until 122
    assert timeline.bubbles == pytest.approx((0.4, 0.4))
    assert timeline.exposed == 0


def test_a_step_without_stages_is_refused() -> None:
    step, _ = place(0, stage(0), two_stages("GPipe", 2, 0))
    with pytest.raises(SimulationError, match=r"^the step has no pipeline stages, .*$"):
        simulate_stages([replace(step, pipelined=None)], CLUSTER)
