"""A small Llama, traced and passed once for all tests of timelines."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from suites.checks.small_llama import SmallLlama


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> PlanOnMesh:
    """On four ranks, through our pass."""
    return SmallLlama.make(tmp_path_factory.mktemp("llama"), pools).run("manual").world
