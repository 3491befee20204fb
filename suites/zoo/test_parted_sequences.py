"""A model of transformers with its sequence parted over cp, as docs/howto/context-parallel.md has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.docs.blocks import blocks_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "context-parallel.md"
PLAN = """
[model]
factory = "suites.zoo.test_parted_sequences:build"
batch = "suites.zoo.test_parted_sequences:batch"
loss = "suites.zoo.test_parted_sequences:loss"
inputs = ["input_ids", "position_ids"]

[parallel]
cp = 3
cp_form = "ring"

[bucket]
plan = ["model.embed_tokens", "model.layers.*", "model.norm+lm_head"]

[run]
steps = 1
"""


def build() -> nn.Module:
    (text,) = (block.text for block in blocks_in(str(PAGE), PAGE.read_text()) if "transformers" in block.text)
    made: dict[str, Any] = {}
    exec(text, made)
    model: nn.Module = made["build"]()
    return model


def batch(rank: int, step: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, 128, (2, 13), generator=torch.Generator().manual_seed(1_000_003 * step + rank))
    return {"input_ids": drawn[:, :-1], "position_ids": torch.arange(12).repeat(2, 1), "labels": drawn[:, 1:]}


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def plan_run(pools: Pools, tmp_path: Path) -> PlanRun:
    (plan,) = parse_plans(PLAN, tmp_path / "ring.toml")
    return PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path), pools)


def test_llama_of_transformers_steps_in_a_ring_as_torchs_own_attention_does(plan_run: PlanRun) -> None:
    for check in ("audit", "collectives", "eager"):
        verdict = plan_run.check(check)
        assert verdict.outcome == "passed", (verdict.summary, verdict.lines)
