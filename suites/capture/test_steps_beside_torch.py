"""Whole steps beside torch's own, by the check ``eager``: losses, gradients, parameters, buffers and state, bit for bit.

All ranks are in one process. Of the plans in fixtures/plans (adamw, chunked, iterations, optimizers, whole ...) their own item
says it, on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixtures.models import moe
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_checks import Eager
from suites.capture import override_plans, steps
from suites.capture.override_plans import override
from suites.capture.parity import PLANS, ROOT
from suites.plans.llama import MIXED, llama

LLAMA = (
    llama("layers = 1, dim = 16, heads = 2, kv_heads = 1", 1, mode="replicate", dp_replicate=2)
    + """
[step]
clip_norm = 0.5
microbatches = 2
[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01 }
[[matrix]]
id = "uneven_shards"
parallel = { mode = "fully_shard", dp_replicate = 1, dp_shard = 3, param_dtype = "bfloat16", reduce_dtype = "float32" }
step.microbatches = 1
[[matrix]]
id = "computed_again_and_kept"
step.microbatches = 1
parallel = { mode = "fully_shard", dp_replicate = 1, dp_shard = 2, param_dtype = "bfloat16", reshard_after_forward = false }
step.checkpoint = ["layers.*"]
"""
)
# FSDP2 asks for one dtype in a unit, so norms of float64 are units of their own. A unit called twice is reduced twice, and the
# averages added; capture reads a parameter once, as FSDP2's root does.
GPT = """
[model]
factory = "fixtures.models.gpt:build"
args = { layers = 1, dim = 16, tied = true, frozen = ["layers.0.attention_norm"], norm_dtype = "float64", counts = true }
batch = "fixtures.models.gpt:batch"
loss = "fixtures.models.gpt:loss"
[parallel]
dp_shard = 3
[bucket]
unplanned = "root"
plan = ["layers.0.attention_norm", "layers.0.mlp_norm", "norm", "layers.0.attention+layers.0.mlp"]
[[matrix]]
id = "hybrid_shard-reduced_in_bfloat16-computed_again-two_optimizers_of_several_groups"
model.args = { layers = 1, dim = 16, tied = true, frozen = ["layers.0.attention_norm"] }
bucket.plan = []
parallel = { mode = "hybrid_shard", dp_replicate = 2, dp_shard = 2, reduce_dtype = "bfloat16" }
step = { clip_norm = 0.5, microbatches = 2, checkpoint = ["layers.*"] }
[[matrix.optimizer]]
factory = "torch.optim:SGD"
args = { lr = 0.1, momentum = 0.9, nesterov = true }
params = ["tokens", "positions"]
groups = [{ params = ["positions"], lr = 0.3 }, { momentum = 0.5 }]
[[matrix.optimizer]]
factory = "torch.optim:Adam"
args = { lr = 0.01 }
groups = [{ params = ["layers.0.mlp_norm", "norm"], lr = 0.02 }, { weight_decay = 0.1 }]
[[matrix]]
id = "a_layer_called_twice"
model.args = { layers = 2, dim = 16, tied = true, twice = 0, frozen = ["layers.1"], counts = true }
bucket.plan = ["layers.1"]
"""


def rows(text: str, first: str) -> dict[str, Plan]:
    """The plans of ``text``, of which the one without an id is called ``first``."""
    return {plan.matrix_id or first: plan for plan in parse_plans(text, Path("plan.toml"))}


def floating(*entries: str, factory: str = "FloatsBetween", **args: bool) -> Plan:
    """float32 between units: inputs of each are cast as FSDP2 casts those of its units."""
    return replace(
        steps.plan_of(factory, args=args, dp_shard=2, **MIXED), bucket=Bucket(plan=parse_entries(list(entries), "plan"))
    )


def overridden(factory: str, of: Any = None, **rest: Any) -> Plan:
    return override_plans.plan_of(factory, of or override(type="Chooses"), **rest)


T5 = """
[model]
factory = "fixtures.models.t5:build"
args = { layers = 1, dim = 16 }
batch = "fixtures.models.t5:batch"
[parallel]
dp_shard = 2
[bucket]
plan = ["shared", "encoder.block.0+encoder.final_layer_norm", "decoder.block.0+decoder.final_layer_norm"]
"""
# ep of 3 divides no bit pattern alone: averages are divided once more, in the dtype that they were reduced in.
MOE = """
[model]
factory = "fixtures.models.moe:build"
args = { layers = 2, dim = 16, experts = 6, capacity = 6 }
batch = "fixtures.models.moe:batch"
loss = "fixtures.models.moe:loss"
[parallel]
mode = "hybrid_shard"
dp_replicate = 2
dp_shard = 2
ep = 2
ep_plan = ["layers.*.experts"]
[bucket]
unplanned = "root"
plan = ["layers.*.experts"]
[step]
microbatches = 2
checkpoint = ["layers.0.experts", "layers.1"]
[[matrix]]
id = "experts_reduced_in_bfloat16_over_2_of_6_ranks_round_a_ring"
parallel = { mode = "fully_shard", dp_replicate = 1, dp_shard = 6, ep = 3, param_dtype = "bfloat16", reduce_dtype = "bfloat16" }
bucket.plan = ["embed", "layers.0+layers.1"]
step.microbatches = 1
run.reduce = "ring"
"""
ATTENDS = override(type="Attends", output="attended")
PAIRED = {"tp": 2, "tp_plan": {"layers.*.0": "colwise", "layers.*.1": "rowwise"}}
IS_OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether FSDP2 casts the inputs of the first module of a unit alone: torch 2.11 and 2.12."""
CASES: dict[str, Plan] = {
    **rows(LLAMA, "replicate-clipped-AdamW"),
    **rows(GPT, "frozen and tied, norms of float64"),
    **rows(T5, "two branches, tied"),
    **rows(MOE, "experts: entries, computed again, copies of one rank each"),
    "float32 between: together": floating("layers.0+layers.1", "layers.2+head"),
    "float32 between: by name, in a dict": floating("layers.[0-2]", "head", named=True),
    "override: several inputs and results, 3 ranks": overridden("AroundAttention", ATTENDS, dp_shard=3, **MIXED),
    "override: gathered once": overridden("Deep", reshard_after_forward=False, **MIXED),
    "override: computed again around": overridden("Deep", checkpoint="layers.*", microbatches=2, **MIXED),
    "override: computed again itself": overridden("Deep", checkpoint="layers.*.1"),
    "override: beside linears that tp parts, biases added once": replace(
        overridden("deep_pairs", **PAIRED), eager=Eager(rounds_otherwise=("rowwise_bias",))
    ),
    "override: of two names": overridden("holds Ties", override(module="held")),
    "override: of what hands attributes on": overridden("holds hands_on", override(module="held")),
    "override: called twice, read elsewhere": overridden("Twice", **MIXED),
}


@pytest.mark.parametrize("plan", CASES.values(), ids=CASES.keys())
def test_the_step_leaves_what_torchs_own_leaves(plan: Plan, checked: Callable[..., Any]) -> None:
    two_steps = replace(plan, run=replace(plan.run, steps=2))
    verdict = checked(two_steps, "eager", backend="local")
    if plan is CASES["float32 between: together"] and IS_OLDER:
        assert verdict.outcome == "skipped"
        assert "mat1 and mat2 must have the same dtype" in verdict.summary
    else:
        assert verdict.outcome == "passed", verdict


class ByPlace(moe.Experts):
    """The first of those that are there gives its tokens back."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:1], super().forward(x)[1:]])


class Draws(moe.Experts):
    """Drops out as it pleases."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


class Weights(nn.Module):
    """One matrix an expert."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, inner, outer) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class Nested(nn.Module):
    """Gated experts of several modules, and a bias of their own."""

    def __init__(self, shape: moe.MoeShape) -> None:
        super().__init__()
        self.gate, self.up, self.down = Weights(16, 24), Weights(16, 24), Weights(24, 16)
        self.bias = nn.Parameter(torch.randn(4, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x)) + self.bias
        return out


class ByName(moe.Layer):
    """Gives its experts their tokens by name."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights = self.router(normed)
        dispatched = torch.einsum("tec,td->ecd", (weights > 0).to(x.dtype), normed)
        return x + torch.einsum("tec,ecd->td", weights, self.experts(x=dispatched))


def experts_of(kind: str) -> moe.Moe:
    """Two layers, whose experts are one module."""
    model = moe.build(layers=2, dim=16)
    for layer in model.layers:
        layer.__class__ = ByName
        layer.experts = globals()[kind](moe.MoeShape(dim=16)) if layer is model.layers[0] else model.layers[0].experts
    return model


def plan_with(factory: str, args: str, parallel: str) -> Plan:
    model = f'factory = "{__name__}:{factory}"\nargs = {args}\nbatch = "fixtures.models.moe:batch"\n'
    loss = 'loss = "fixtures.models.moe:loss"\n'
    text = f'[model]\n{model}{loss}[parallel]\n{parallel}\n[bucket]\nunplanned = "root"\n[run]\nsteps = 1\n'
    (plan,) = parse_plans(text, Path("plan.toml"))
    return plan


def with_experts(kind: str) -> Plan:
    return plan_with("experts_of", f'{{ kind = "{kind}" }}', 'dp_shard = 4\nep = 2\nep_plan = ["layers.*.experts"]')


class Pairs(nn.Module):
    """Two pairs of linears: the first of each is one module, the second of each have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(moe.VOCAB, 8), nn.Linear(8, 12)
        self.layers = nn.ModuleList(nn.ModuleList([self.up, nn.Linear(12, 8, bias=False)]) for _ in range(2))
        self.layers[1][1].weight = self.layers[0][1].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for up, down in self.layers:
            x = x + down(F.gelu(up(x)))
        return x @ self.embed.weight.T


def test_what_tp_parts_under_two_names_is_one(checked: Callable[..., Any]) -> None:
    styles = '{ "layers.*.0" = "colwise", "layers.*.1" = "rowwise" }'
    plan = plan_with("Pairs", "{}", f"dp_shard = 2\ntp = 2\ntp_plan = {styles}")
    verdict = checked(plan, "eager", backend="local")
    assert verdict.outcome == "passed", verdict
    assert verdict.summary.startswith("9 tensors a step"), "a loss, and of four parameters gradients and themselves"


def test_entries_within_experts_are_units_where_a_ring_adds(checked: Callable[..., Any]) -> None:
    """Of three ranks, so that the order of a sum depends on where it lies in its bucket."""
    plan = with_experts("Nested")
    parallel, entries = replace(plan.parallel, dp_shard=6), ["layers.0.experts.gate", "layers.0.experts.down+embed"]
    bucket = replace(plan.bucket, plan=parse_entries(entries, "plan"))
    verdict = checked(
        replace(plan, parallel=parallel, bucket=bucket, run=replace(plan.run, reduce="ring")), "eager", backend="local"
    )
    assert verdict.outcome == "passed", verdict
    assert "; sums round a ring" in verdict.summary


def test_experts_that_know_their_place_are_another_step(checked: Callable[..., Any]) -> None:
    verdict = checked(with_experts("ByPlace"), "eager", backend="local")
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert "of some of its experts layers.0.experts gives other values than of all" in line
    assert "first of expert 2; with ep it is called on each rank" in line


def test_experts_that_draw_are_left_open(checked: Callable[..., Any]) -> None:
    verdict = checked(with_experts("Draws"), "eager", backend="local")
    assert verdict.outcome == "passed", verdict
    assert "are those of torch's FSDP2 with tokens sent by all_to_all_single bit for bit on 4 ranks" in verdict.summary
    assert "; not asked whether some experts give what they do among all: in eval() the model draws" in verdict.summary


def test_every_model_of_the_fixtures_is_compared() -> None:
    """But for graphs without a model."""
    models = {f"fixtures.models.{path.stem}" for path in (ROOT / "fixtures" / "models").glob("*.py")}
    plans = [*CASES.values(), *(plan for plan in PLANS.values() if plan.checks.eager)]
    compared = {plan.model.factory.partition(":")[0] for plan in plans if plan.model is not None}
    assert models - {f"fixtures.models.{name}" for name in ("__init__", "traced", "placed", "split")} <= compared
