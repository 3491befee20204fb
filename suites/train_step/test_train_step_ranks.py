"""A captured step on real ranks, its collectives bucketed by a transform, trains as eager does."""

from __future__ import annotations

from pathlib import Path

from pytest_fxbucket.ranks.pools import Pools

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
JOB = "suites.train_step.data_parallel_jobs:steps"


def test_bucketed_data_parallel_steps_train_as_eager_on_two_ranks(pools: Pools) -> None:
    results = pools.get(WORLD).run(JOB, [{"steps": 3}] * WORLD, timeout_s=60, paths=[str(ROOT)])
    assert results[0] == results[1]
    assert results[0] == {
        "replicated": {"all_reduce": 12, "all_gather": 0, "reduce_scatter": 0},
        "sharded": {"all_reduce": 0, "all_gather": 6, "reduce_scatter": 6},
        "replicated, bucketed": {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0},
        "sharded, bucketed": {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2},
    }
