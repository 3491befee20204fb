"""The real DeepSpeed and Megatron, where they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from pytest_fxbucket.pipeline import table_of
from pytest_fxbucket.ranks.pools import Pools
from suites.pipeline.test_targets import THREE, same

JOBS = "suites.pipeline.real_engines:"


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (pip install deepspeed)")
@pytest.mark.parametrize("name", ["Parts", "Skips"])
def test_deepspeeds_own_engine_trains_the_stages(pools: Pools, name: str) -> None:
    found = pools.get(3).run(JOBS + "deepspeed", [(name, THREE[name], 4)] * 3, timeout_s=240)
    same(found, name, THREE[name], table_of("1F1B", 3, 3, 4), mean=True)  # type: ignore[arg-type]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (pip install megatron-core)")
@pytest.mark.parametrize("name", ["Keywords", "Parts", "Skips"])
def test_megatrons_own_steps_run_the_chunks(pools: Pools, name: str) -> None:
    """Its schedules want CUDA; what they do with a chunk, a forward and a backward step, does not."""
    found = pools.get(3).run(JOBS + "megatron", [(name, THREE[name], 4)] * 3, timeout_s=240)
    same(found, name, THREE[name], table_of("1F1B", 3, 3, 4), mean=True)  # type: ignore[arg-type]
