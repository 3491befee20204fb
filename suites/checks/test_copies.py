"""Ranks that must hold the same parameters and do not: bits of both runs are equal, and nothing else tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.parallel.modes import Sharded
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Bucket, Model, Parallel, Plan, Run
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings


def bitwise(pools: Pools, folder: Path, model: dict[str, Any], **parallel: Any) -> Verdict:
    plan = Plan(
        Path(__file__).with_name("copies.toml"),
        model=replace(Model("bitwise_models:build", "bitwise_models:batch", {}, "bitwise_models:loss"), **model),
        parallel=Parallel(**parallel),
        bucket=Bucket(plan=parse_entries(["up", "down", "scale"], "test")),
        run=Run(steps=2, timeout_s=60),
    )
    settings = RunSettings(Path(__file__).parent, folder / "golden", folder / "artifacts", "manual")
    return PlanRun(plan, settings, pools).check("bitwise")


HYBRID = {"mode": "hybrid_shard", "dp_replicate": 2, "dp_shard": 2}


def test_copies_that_part_are_red_though_both_runs_are_equally_wrong(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bitwise(pools, tmp_path, {}, **HYBRID).outcome == "passed"

    def forgets_the_copies(self: Sharded, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    monkeypatch.setattr(Sharded, "_over_copies", forgets_the_copies)
    verdict = bitwise(pools, tmp_path, {}, **HYBRID)
    assert verdict.outcome == "failed"
    assert verdict.lines == (
        "ranks 0 and 2 hold copies of scale.weight, up.weight, up.bias and 1 more, which differ after the last step: "
        "their gradients were not reduced alike",
    )


def test_a_factory_that_gives_each_rank_another_model_is_red_and_told_what_to_draw_from(pools: Pools, tmp_path: Path) -> None:
    verdict = bitwise(pools, tmp_path, {"factory": "bitwise_models:build_by_rank"}, mode="replicate", dp_replicate=2)
    assert verdict.outcome == "failed"
    assert verdict.lines[0] == (
        "the model's factory gave another scale.weight on rank 1 than on rank 0; it must give the same model on every rank, "
        "so draw from torch's generator, which is seeded alike, and from nothing that depends on the rank"
    )
