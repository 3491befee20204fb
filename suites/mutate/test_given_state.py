"""State that a transformation adds is held by the check same, though no captured step has it; and what broken worlds share."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan

ADDED = "lerp_scalar"
"""How nodes are named that give what `fixtures.transforms:averaged` adds, and nothing else does here."""


@pytest.fixture(scope="module", name="averaged")
def _averaged(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> BrokenPlan:
    return BrokenPlan(f"{ROOT}/fixtures/plans/averaged.toml", pools, tmp_path_factory.mktemp("averaged"))


@pytest.mark.parametrize("operator", ["operand_swapped", "state_swapped"])
def test_added_state_that_is_wrong_is_found_by_its_name(averaged: BrokenPlan, operator: str) -> None:
    mutant = next(one for one in averaged.mutants(operator) if one.site.node.startswith(ADDED))
    said = averaged.said("same", mutant)
    assert said.outcome == "failed"
    assert any("average." in line.partition(": first differs at ")[0] for line in said.lines), said.lines


def test_added_state_that_is_right_is_green(averaged: BrokenPlan) -> None:
    said = averaged.said("same")
    assert said, said
    assert "compared from behind" in said.summary


def test_what_a_broken_world_is_given_is_read_once(averaged: BrokenPlan) -> None:
    """Readings are kept by the identity of a step, which another step may get once the broken world is gone."""
    world, broken = averaged.world, averaged.broken(averaged.mutants("state_swapped")[0])
    assert broken.reading(0) is world.reading(0)
