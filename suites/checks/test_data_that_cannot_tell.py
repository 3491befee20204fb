"""Whole steps whose data could not tell right from wrong: updates that move nothing, clipping that never bites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_copies import HYBRID

from pytest_fxbucket.capture.parallel.modes import Sharded
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Bucket, Model, Optimizer, Parallel, Plan, Run, Step
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

PLAN = Plan(
    Path(__file__).with_name("whole.toml"),
    model=Model("bitwise_models:build", "bitwise_models:batch", {}, "bitwise_models:loss"),
    parallel=Parallel(dp_shard=2),
    optimizer=(Optimizer("torch.optim:SGD", {"lr": 0.1}),),
    bucket=Bucket(plan=parse_entries(["up", "down", "scale"], "test")),
    run=Run(steps=2, timeout_s=60),
)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    pools.start()
    yield pools
    pools.close()


def bitwise(pools: Pools, folder: Path, **change: Any) -> Verdict:
    settings = RunSettings(Path(__file__).parent, folder / "golden", folder / "artifacts", "manual")
    return PlanRun(replace(PLAN, **change), settings, pools).check("bitwise")


def test_an_update_that_moves_something_is_checked(pools: Pools, tmp_path: Path) -> None:
    verdict = bitwise(pools, tmp_path)
    assert verdict.outcome == "passed"
    assert "parameters" in verdict.summary


def test_a_learning_rate_that_moves_nothing_is_red(pools: Pools, tmp_path: Path) -> None:
    still = (Optimizer("torch.optim:SGD", {"lr": 0.0}),)
    verdict = bitwise(pools, tmp_path, optimizer=still)
    assert verdict.outcome == "failed"
    assert verdict.lines[0].startswith(
        "the optimizer leaves down.weight, scale.weight, up.bias and 1 more as it was on every rank"
    )


@pytest.mark.parametrize(("most", "outcome"), [(1e-3, "passed"), (1e3, "failed")])
def test_clipping_that_never_bites_is_red(pools: Pools, tmp_path: Path, most: float, outcome: str) -> None:
    verdict = bitwise(pools, tmp_path, step=Step(clip_norm=most))
    assert verdict.outcome == outcome
    if outcome == "failed":
        (line,) = verdict.lines
        assert line.startswith(
            "clip_norm = 1000 never clips, so nothing about it was checked: the largest norm of the gradients is"
        )


def test_the_norm_that_clipping_is_held_to_counts_copies_once(pools: Pools, tmp_path: Path) -> None:
    found = {}
    for name, parallel in (("sharded", Parallel(dp_shard=4)), ("copied", Parallel(**HYBRID))):
        (line,) = bitwise(pools, tmp_path, step=Step(clip_norm=1e3), parallel=parallel).lines
        found[name] = line
    assert found["sharded"] == found["copied"]


def test_copies_whose_gradients_part_are_red_before_any_update_moves_them(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_copies(self: Sharded, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    monkeypatch.setattr(Sharded, "_over_copies", forgets_the_copies)
    still = (Optimizer("torch.optim:SGD", {"lr": 0.0}),)
    verdict = bitwise(pools, tmp_path, optimizer=still, parallel=Parallel(**HYBRID))
    assert any(line.startswith("ranks 0 and 2 hold copies of") for line in verdict.lines)


def test_ranks_of_one_batch_with_other_losses_are_red(pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"parallel": Parallel(dp_shard=2, tp=2, tp_plan={"up": "colwise", "down": "rowwise"})}
    model = {"model": replace(PLAN.model, factory="bitwise_models:build_beside")} if PLAN.model is not None else {}
    assert bitwise(pools, tmp_path, **plan, **model).outcome == "passed"
    monkeypatch.setattr("pytest_fxbucket.capture.parallel.tensor_parallel._summed", lambda part, group: part.clone())
    verdict = bitwise(pools, tmp_path, **plan, **model)
    assert any(line.startswith("ranks 0 and 1 have one batch, since tp parts them, but other losses") for line in verdict.lines)
