"""Runs that are equal and prove nothing: data that cannot tell, updates that move nothing, copies that part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.parallel.modes import Sharded
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan.schema_model import Optimizer, Parallel, Step

SGD = (Optimizer("torch.optim:SGD", {"lr": 0.1}),)
STILL = (Optimizer("torch.optim:SGD", {"lr": 0.0}),)
ON_EDGES = Run(steps=3, timeout_s=60)
"""The last of these steps is on edge values, which change everything and so must not hide what the data cannot tell."""
HYBRID = Parallel(mode="hybrid_shard", dp_replicate=2, dp_shard=2)
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "zero gradient": (
        {"model": {"args": {"used": 0.0}}},
        "the gradient of scale.weight is zero on every rank in every step",
    ),
    "equal batches": ({"model": {"batch": "bitwise_models:equal_batch"}}, "all ranks got the same batch in step 0"),
    "infinite": ({"model": {"batch": "bitwise_models:infinite_batch"}}, "are not finite, so equal bits mean nothing"),
    "no update": (
        {"optimizer": STILL},
        "the optimizer leaves down.weight, scale.weight, up.bias and 1 more as it was on every rank",
    ),
    "no update in few steps": (
        {"optimizer": STILL, "run": Run(steps=2, timeout_s=60)},
        "the optimizer leaves down.weight, scale.weight, up.bias and 1 more as it was on every rank",
    ),
    "a model for each rank": (
        {"model": {"factory": "bitwise_models:build_by_rank"}, "parallel": Parallel(mode="replicate", dp_replicate=2)},
        "the model's factory gave another scale.weight on rank 1 than on rank 0; it must give the same model on every rank, "
        "so draw from torch's generator, which is seeded alike, and from nothing that depends on the rank",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_cannot_tell_right_from_wrong_is_red(bitwise: Callable[..., Verdict], change: str) -> None:
    changed, words = CHANGES[change]
    verdict = bitwise(**{"run": ON_EDGES, **changed})
    assert verdict.outcome == "failed"
    assert words in verdict.lines[0]


IDLE = {"args": {"used": 0.0}, "may_be_idle": parse_entries(["scale"], "test")}


def test_a_gradient_that_may_be_zero_is_said_and_no_fault(bitwise: Callable[..., Verdict]) -> None:
    verdict = bitwise(model=IDLE, optimizer=SGD, run=ON_EDGES)
    assert verdict.outcome == "passed", verdict
    assert "(nothing of scale.weight, idle in every step)" in verdict.summary
    busy = bitwise(model={**IDLE, "args": {}}, optimizer=SGD)
    assert busy.outcome == "passed", busy
    assert "idle" not in busy.summary


def test_another_gradient_that_is_zero_is_red_all_the_same(bitwise: Callable[..., Verdict]) -> None:
    verdict = bitwise(model={**IDLE, "factory": "bitwise_models:build_by_seed"}, run=Run(steps=2, seed=7))
    assert verdict.outcome == "failed"
    assert verdict.lines == (
        "the gradient of down.weight, up.bias, up.weight is zero on every rank in every step, so nothing about it was checked; "
        "give the batch or the loss values that reach it, or, if it may get none, name it in [model] may_be_idle",
    )


def test_what_may_be_idle_and_is_not_there_is_named_beside_the_nearest(bitwise: Callable[..., Verdict]) -> None:
    with pytest.raises(PlanError, match=r'\[model\] may_be_idle: entry "scales" matches nothing; did you mean "scale"'):
        bitwise(model={"may_be_idle": parse_entries(["scales"], "test")})


def test_a_parameter_without_elements_is_not_asked_to_move(bitwise: Callable[..., Verdict]) -> None:
    copied = Parallel(mode="replicate", dp_replicate=2)
    verdict = bitwise(model={"factory": "bitwise_models:build_with_none"}, parallel=copied, optimizer=SGD)
    assert verdict.outcome == "passed", verdict


def test_ranks_that_part_a_batch_that_all_have_are_red(bitwise: Callable[..., Verdict]) -> None:
    llama: dict[str, Any] = {
        "model": {
            "factory": "fixtures.models.llama_sdpa:build",
            "batch": "bitwise_models:equal_tokens",
            "loss": "fixtures.models.llama_sdpa:loss",
        },
        "parallel": Parallel(dp_shard=2, cp=2),
        "bucket": Bucket(plan=parse_entries(["tok_embeddings", "layers.*", "norm+output"], "test")),
    }
    assert any("all ranks got the same batch in step 0" in line for line in bitwise(**llama).lines)


def test_an_update_that_moves_something_and_clipping_that_bites_are_checked(bitwise: Callable[..., Verdict]) -> None:
    verdict = bitwise(optimizer=SGD, step=Step(clip_norm=1e-3))
    assert verdict.outcome == "passed"
    assert "parameters" in verdict.summary


def test_clipping_that_never_bites_is_red_by_a_norm_that_counts_copies_once(bitwise: Callable[..., Verdict]) -> None:
    never = {"optimizer": SGD, "step": Step(clip_norm=1e3), "run": ON_EDGES}
    (sharded,), (copied,) = (bitwise(parallel=parallel, **never).lines for parallel in (Parallel(dp_shard=4), HYBRID))
    assert sharded == copied
    assert sharded.startswith(
        "clip_norm = 1000 never clips, so nothing about it was checked: the largest norm of the gradients is"
    )


def test_copies_that_part_are_red_though_both_runs_are_equally_wrong(
    bitwise: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no update moves them yet."""
    assert bitwise(parallel=HYBRID).outcome == "passed"

    def forgets_the_copies(self: Sharded, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    monkeypatch.setattr(Sharded, "_over_copies", forgets_the_copies)
    verdict = bitwise(parallel=HYBRID, anew=True)
    assert verdict.outcome == "failed"
    assert verdict.lines == (
        "ranks 0 and 2 hold copies of scale.weight, up.weight, up.bias and 1 more, which differ after the last step: "
        "their gradients were not reduced alike",
    )
    still = bitwise(optimizer=STILL, parallel=HYBRID, anew=True)
    assert any(line.startswith("ranks 0 and 2 hold copies of") for line in still.lines)


def test_ranks_of_one_batch_with_other_losses_are_red(bitwise: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    plan: dict[str, Any] = {
        "parallel": Parallel(dp_shard=2, tp=2, tp_plan={"up": "colwise", "down": "rowwise"}),
        "model": {"factory": "bitwise_models:build_beside"},
        "optimizer": SGD,
    }
    assert bitwise(**plan).outcome == "passed"
    monkeypatch.setattr("pytest_fxbucket.capture.parallel.tensor_parallel.summed", lambda part, group: part.clone())
    lines = bitwise(**plan, anew=True).lines
    assert any(line.startswith("ranks 0 and 1 have one batch, since tp parts them, but other losses") for line in lines)
