"""A simulated step as stretches: of each stream what ran, of each collective its launch, its flight and its wait."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from pytest_fxbucket.bench.timeline.simulated import SimulatedStretch, pieces_of, staged_pieces
from pytest_fxbucket.simulate.simulator import simulate
from suites.graph.handmade import Handmade, aten
from suites.simulate.test_calibrate import ASSUMED, step_of
from suites.simulate.test_stages_of_schedules import simulated, stage


def test_what_ran_and_what_blocked_stands_on_its_stream() -> None:
    made = Handmade(4)
    x, shard = made.batch(4), made.param("w", 4)
    early, late = made.gather(shard), made.gather(shard)
    work = made.call(aten.neg.default, x)
    made.wait(early)
    made.wait(late)
    module = fx.GraphModule(torch.nn.Module(), made.finish())
    step = replace(step_of((64,)), graphs={"joint": module}, inputs={"joint": tuple(made.inputs)})
    took = {early.name: 3e-6, late.name: 4e-6, work.name: 5e-6}
    cluster = replace(ASSUMED, launch=1e-6)
    pieces = list(pieces_of(simulate(step, cluster, lambda node: took[node.name])))
    assert pieces == [
        SimulatedStretch("0", "flight", "joint", early.name, 1000, 4000),
        SimulatedStretch("0", "flight", "joint", late.name, 4000, 8000),
        SimulatedStretch("compute", "compute", "joint", work.name, 3000, 8000),
        SimulatedStretch("compute", "launch", "joint", early.name, 1000, 1000),
        SimulatedStretch("compute", "launch", "joint", late.name, 2000, 2000),
    ]
    took[work.name] = 1e-6
    assert list(pieces_of(simulate(step, cluster, lambda node: took[node.name])))[-1] == SimulatedStretch(
        "compute", "wait", "joint", late.name, 4000, 8000
    )


def test_a_schedule_stands_by_stages() -> None:
    timeline = simulated([stage(0), stage(1)], 5_000)
    assert list(staged_pieces(timeline, 1)) == [
        SimulatedStretch("stage 1", "compute", "forward 0", "", 15_000, 25_000),
        SimulatedStretch("stage 1", "compute", "forward 1", "", 25_000, 35_000),
        SimulatedStretch("stage 1", "compute", "backward 0", "", 35_000, 55_000),
        SimulatedStretch("stage 1", "compute", "backward 1", "", 55_000, 75_000),
    ]
