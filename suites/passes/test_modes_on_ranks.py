"""Steps of every parallel mode, traced, on real ranks before and after the pass: bit for bit."""

from __future__ import annotations

import pytest

from pytest_fxbucket.fuzz.on_ranks import compare_all
from pytest_fxbucket.ranks.pools import Pools
from suites.checks.traced_modes import DDP, FULLY, REPLICATE, REPLICATE_FIRST, SCATTER_FIRST, SHARD, Step, Way, traced
from suites.passes.programs import SETTINGS

STEPS = {
    "two microbatches, recomputed, at four ranks": Step(microbatches=2, recompute=True, world=4),
    "three microbatches, kept": Step(microbatches=3, reshard=False),
    "replicated": Step(way=DDP, reshard=False, microbatches=2),
    "replicate first": Step(way=REPLICATE_FIRST, world=4, microbatches=2),
    "scatter first, scaled": Step(way=SCATTER_FIRST, world=4, scaled=True),
    "experts": Step(world=4, ways=(("layers.1.w", Way(SHARD, (("reduce_scatter", "avg", SHARD),))),)),
    "everything": Step(
        way=SCATTER_FIRST,
        world=4,
        activations=REPLICATE,
        microbatches=2,
        recompute=True,
        frozen=frozenset({"layers.0.w"}),
        ways=(("layers.2.b", FULLY),),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_mode_is_the_same_step_after_the_pass(pools: Pools, name: str) -> None:
    made = traced(STEPS[name])
    passed = [made.passed(**options) for options in SETTINGS]
    for options, one in zip(SETTINGS, passed, strict=True):
        assert made.problems(one.after, **options) == []
    groups = made.step.groups
    found = compare_all(pools, made.graph_module, [one.after for one in passed], made.step.world, groups=groups)
    assert found == [[]] * len(SETTINGS)
