"""Plans of whole steps, and how eager torch is told the same.

Two of what a plan may say have no twin in eager torch: clipping with tensor parallelism (``clip_grad_norm_`` raises over
parameters of two meshes), and experts that tokens travel to. Their norms are tested in test_whole_step_norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity import STEPS, payload_of

from pytest_fxbucket.checks.bitwise.job import BitwiseTask
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.step.roles import StepGraph

LLAMA = """
[model]
factory = "fixtures.models.llama:build"
args = { layers = 2, dim = 32 }
batch = "fixtures.models.llama:batch"
loss = "fixtures.models.llama:loss"
[bucket]
plan = ["tok_embeddings", "layers.[0-1]", "norm+output"]
"""
GPT = """
[model]
factory = "fixtures.models.gpt:build"
args = { tied = true, frozen = ["layers.0.attention_norm"] }
batch = "fixtures.models.gpt:batch"
loss = "fixtures.models.gpt:loss"
[bucket]
unplanned = "root"
"""
MOE = """
[model]
factory = "fixtures.models.moe:build"
batch = "fixtures.models.moe:batch"
loss = "fixtures.models.moe:loss"
[parallel]
dp_shard = 4
ep = 2
ep_plan = ["layers.*.experts"]
[bucket]
plan = ["embed", "layers.[0-1]", "norm+output"]
"""
BY_FOUR = "[parallel]\ndp_shard = 4\n"
BY_THREE = "[parallel]\ndp_shard = 3\n"
COPIED = '[parallel]\nmode = "replicate"\ndp_replicate = 2\n'
HYBRID = '[parallel]\nmode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 2\n'
TP = """
[parallel]
dp_shard = 2
tp = 2
[parallel.tp_plan]
"layers.*.attention.wq" = "colwise"
"layers.*.attention.wk" = "colwise"
"layers.*.attention.wv" = "colwise"
"layers.*.attention.wo" = "rowwise"
"layers.*.feed_forward.w1" = "colwise"
"layers.*.feed_forward.w3" = "colwise"
"layers.*.feed_forward.w2" = "rowwise"
"""
CLIPPED = "[step]\nclip_norm = 0.5\n"
ADAMW = '[optimizer]\nfactory = "torch.optim:AdamW"\nargs = { lr = 0.01 }\n'

Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]
"""Modules and parameters (none: all that are left), and options of each group."""
ONE: Groups = [((), {})]
GPT_NORMS = [f"layers.{layer}.{name}" for layer in (0, 1) for name in ("attention_norm", "mlp_norm")] + ["norm"]


@dataclass(frozen=True)
class Case:
    """A plan, and how eager torch is told of its optimizers."""

    text: str
    optimizers: Sequence[tuple[str, Mapping[str, Any], Groups]] = (("torch.optim:AdamW", {"lr": 0.01}, ONE),)

    @property
    def plan(self) -> Plan:
        (plan,) = parse_plans(self.text, Path("plan.toml"))
        return plan


def payloads_of(plan: Plan, step: StepGraph, decay: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``graph_steps`` needs, and what any ``eager_steps`` does: nothing of ours."""
    eager = payload_of(plan, step)
    graph = eager.pop("graph")
    assert plan.model is not None
    task = BitwiseTask(
        unbucketed=graph,
        bucketed=graph,
        inputs=eager.pop("inputs"),
        outputs=eager.pop("outputs"),
        model=plan.model,
        example_inputs=(),
        seed=plan.run.seed,
        steps=STEPS,
        where="plan.toml",
        mesh=eager.pop("capture_mesh"),
        parallel=eager.pop("parallel"),
        parameters=eager.pop("parameters"),
        optimizing=step.optimizing,
    )
    eager |= {"decay": decay, "clip_norm": plan.step.clip_norm}
    return {"task": task, "decay": decay, "data_rank": eager["data_rank"]}, eager


def named_by(optimizers: Sequence[tuple[str, Mapping[str, Any], Groups]], fqns: Sequence[str]) -> list[Any]:
    """``optimizers`` with the parameters of each group instead of what is listed."""
    left, named = list(fqns), []
    for factory, args, groups in optimizers:
        everywhere = [one for of, _ in groups for one in of]
        rest = [fqn for fqn in left if not _is_of(fqn, everywhere)]
        held = [([fqn for fqn in left if _is_of(fqn, of)] if of else rest, options) for of, options in groups]
        named.append((factory, args, held))
        left = [fqn for fqn in left if not any(fqn in of for of, _ in held)]
    assert not left
    return named


def _is_of(fqn: str, names: Sequence[str]) -> bool:
    return any(fqn == name or fqn.startswith(f"{name}.") for name in names)


# Of fixtures/plans their own item `eager` says it: adamw, optimizers, iterations and whole.toml.
CASES = {
    "AdamW, clipped, uneven shards": Case(LLAMA + BY_THREE + ADAMW + CLIPPED),
    "AdamW, 2 microbatches, checkpointed, clipped": Case(
        LLAMA + BY_FOUR + ADAMW + CLIPPED + 'microbatches = 2\ncheckpoint = ["layers.*"]'
    ),
    "hybrid_shard, Adam with amsgrad, clipped": Case(
        LLAMA + HYBRID + CLIPPED + '[optimizer]\nfactory = "torch.optim:Adam"\nargs = { lr = 0.01, amsgrad = true }',
        [("torch.optim:Adam", {"lr": 0.01, "amsgrad": True}, ONE)],
    ),
    "replicate, AdamW, clipped": Case(LLAMA + COPIED + ADAMW + CLIPPED),
    "GPT with LayerNorms, frozen and tied, AdamW": Case(GPT + BY_FOUR + ADAMW),
    "hybrid_shard, GPT, two optimizers of several groups": Case(
        GPT
        + HYBRID
        + f"""
[[optimizer]]
factory = "torch.optim:SGD"
args = {{ lr = 0.1, momentum = 0.9, nesterov = true }}
params = ["tokens", "positions"]
groups = [{{ params = ["positions"], lr = 0.3 }}, {{ momentum = 0.5 }}]
[[optimizer]]
factory = "torch.optim:Adam"
args = {{ lr = 0.01 }}
groups = [{{ params = {GPT_NORMS[1:]}, lr = 0.02 }}, {{ weight_decay = 0.1 }}]
""".replace("'", '"'),
        [
            (
                "torch.optim:SGD",
                {"lr": 0.1, "momentum": 0.9, "nesterov": True},
                [(["positions"], {"lr": 0.3}), (["tokens"], {"momentum": 0.5})],
            ),
            ("torch.optim:Adam", {"lr": 0.01}, [(GPT_NORMS, {"lr": 0.02}), ((), {"weight_decay": 0.1})]),
        ],
    ),
}
