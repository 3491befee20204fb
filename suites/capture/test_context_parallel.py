"""Sequences parted over cp: the step of whole sequences but for the order of sums, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import llama, llama_sdpa
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.parallel import context_parallel, sequence_parallel
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import Group, mesh_with
from suites.capture.parity import PLANS, ROOT, payload_of, run, step_of

CP = PLANS["cp"]
STEPS = 2


Steps = list[tuple[list[Tensor], dict[str, Tensor]]]
"""Of each the losses of both batches, and the gradients."""


def of_whole_sequences() -> Steps:
    """Steps of one process."""
    torch.manual_seed(CP.run.seed)
    model, found = llama_sdpa.build(), Steps()
    for step in range(STEPS):
        batches = [llama_sdpa.batch(rank, step) for rank in range(2)]
        losses = [llama_sdpa.loss(model(tokens, positions), targets) for tokens, positions, targets in batches]
        gradients = torch.autograd.grad((losses[0] + losses[1]) / 2, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        names = [fqn for fqn, _ in model.named_parameters()]
        found.append(([loss.detach() for loss in losses], dict(zip(names, gradients, strict=True))))
    return found


def distance(pools: Pools) -> float:
    """The largest difference of losses, and of gradients as a share of the largest element."""
    ranks = run(pools, "parity_jobs:graph_steps", payload_of(CP, step_of(CP), steps=STEPS))
    off = 0.0
    for number, (losses, gradients) in enumerate(of_whole_sequences()):
        made = [rank["steps"][number] for rank in ranks]
        for batch, loss in enumerate(losses):
            off = max(off, float(((made[2 * batch]["loss"] + made[2 * batch + 1]["loss"]) / 2 - loss).abs()))
        for fqn, expected in gradients.items():
            whole = torch.cat([one["gradients"][fqn] for one in made])
            off = max(off, float((whole - expected).abs().max() / expected.abs().max()))
    return off


def test_two_steps_are_those_of_whole_sequences_but_for_the_order_of_sums(pools: Pools) -> None:
    assert distance(pools) < 1e-5  # float32: 1.2e-7 a sum


@cache
def right(name: str) -> Callable[..., Any]:
    return {"gathered": sequence_parallel.gathered, "causal": context_parallel.causal}[name]


def by_local_positions(queries: int, keys: int, place: Tensor, device: torch.device) -> Tensor:
    return right("causal")(queries, keys, torch.zeros_like(place), device)


def other_order(part: Tensor, group: Group, dim: int = 1) -> Tensor:
    return torch.cat(right("gathered")(part, group, dim).chunk(group.size, dim)[::-1], dim)


def own_alone(addend: Tensor, group: Group, dim: int = 1) -> Tensor:
    """The gradient of the part that comes first, for what should be the sum of all ranks' of this one's."""
    return addend.chunk(group.size, dim)[0].contiguous()


FAULTS = {
    "masked by local positions": (context_parallel, "causal", by_local_positions),
    "keys and values in another order": (sequence_parallel, "gathered", other_order),
    "gradients of keys and values that are not summed": (sequence_parallel, "reduced", own_alone),
}


@pytest.mark.parametrize(("of", "name", "wrong"), FAULTS.values(), ids=FAULTS.keys())
def test_of_a_wrong_capture_eager_is_red(
    of: object, name: str, wrong: Callable[..., Tensor], pools: Pools, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    right("gathered"), right("causal")
    monkeypatch.setattr(of, name, wrong)
    verdict = PlanRun(CP, RunSettings(ROOT, tmp_path / "golden", tmp_path), pools).check("eager")
    assert verdict.outcome == "failed"
    assert any("elements differ" in line for line in verdict.lines), verdict.lines


class Counts(llama.Llama):
    """Counts positions by itself, so those of each part begin at 0."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def counts() -> nn.Module:
    return Counts(llama.LlamaShape(2, 32, 4, 2), llama_sdpa.Attention)


def tokens_and_targets(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return llama_sdpa.batch(rank, step)[::2]


def test_eager_is_red_for_a_model_that_counts_positions_by_itself(pools: Pools, tmp_path: Any) -> None:
    assert CP.model is not None
    model = replace(CP.model, factory=f"{HERE}:counts", batch=f"{HERE}:tokens_and_targets")
    verdict = PlanRun(replace(CP, model=model), RunSettings(ROOT, tmp_path / "golden", tmp_path), pools).check("eager")
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert "of a part of the sequence the model gives other values than of the whole, by " in line
    assert line.endswith("let the batch give them: cp cuts them as it cuts tokens")


class Attends(nn.Module):
    """Attention of another kind than can be parted."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(128, 8)
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.how == "own":
            return self.own(x, x, x, need_weights=False)[0]
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        if self.how == "masked":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).transpose(1, 2).flatten(2)
        if self.how == "crossed":
            return (
                nn.functional.scaled_dot_product_attention(heads, heads[:, :, :2], heads[:, :, :2]).transpose(1, 2).flatten(2)
            )
        return x.cumsum(1) if self.how == "none" else x


def attends(how: str) -> nn.Module:
    return Attends(how)


def batch_of_fifteen(rank: int, step: int) -> tuple[Tensor, ...]:
    return tuple(one[:, :15] for one in llama_sdpa.batch(rank, step))


HERE = "suites.capture.test_context_parallel"
REFUSED = {
    "none": "cp parts the sequence, but the model never calls torch.nn.functional.scaled_dot_product_attention, so no token "
    "would see those of other ranks; attend by it, or leave cp out",
    "masked": "cp parts the sequence, but scaled_dot_product_attention is given a mask of shape (8, 8), which is of a rank's "
    "part alone; use is_causal = True, or no mask",
    "crossed": "cp parts the sequence of queries and keys alike, each (batch, heads, sequence, head_dim), but "
    "scaled_dot_product_attention is given (2, 2, 8, 4) and (2, 2, 2, 4)",
    "own": "cp parts the sequence, and torch.nn.MultiheadAttention has attention of its own, which would see a rank's part "
    "alone; call torch.nn.functional.scaled_dot_product_attention",
}


@pytest.mark.parametrize("how", REFUSED)
def test_attention_that_cannot_be_parted_is_one_sentence(how: str) -> None:
    assert CP.model is not None
    plan = replace(CP, model=replace(CP.model, factory=f"{HERE}:attends", args={"how": how}))
    with pytest.raises(CaptureError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert str(caught.value).endswith(REFUSED[how])


def test_a_sequence_that_does_not_divide_is_one_sentence() -> None:
    assert CP.model is not None
    plan = replace(CP, model=replace(CP.model, batch=f"{HERE}:batch_of_fifteen"))
    with pytest.raises(CaptureError) as caught:
        capture_plan(plan, mesh_of(plan), 0)
    assert str(caught.value) == (
        "cp = 2 does not divide dimension 1 of [0], whose shape is (2, 15); give sequences of another length, or use another cp"
    )


def test_ranks_along_cp_get_parts_of_one_batch_and_share_what_they_shard() -> None:
    mesh = mesh_with({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2})
    assert mesh.data_ranks == 4
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.sharing_batches()[:2] == [[0, 1], [2, 3]]
    assert mesh.ranks(0, mesh.data_parallel("dp_shard")) == (0, 2, 4, 6)
    assert mesh_with({"cp": 4}).data_parallel("dp_shard") == "cp"
    assert list(mesh_with({"dp_shard": 2, "cp": 2}).groups(3)) == ["mesh_dp_shard", "mesh_cp"]
