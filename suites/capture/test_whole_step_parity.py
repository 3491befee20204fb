"""Whole steps, optimizer and all, against eager torch on real ranks: losses, gradients, parameters and state, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import differing

from pytest_fxbucket.capture.mesh import mesh_of
from pytest_fxbucket.checks.bitwise_job import Task
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.world import World

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = 3
DECAY = 0.75  # of the learning rate after each step: one that is baked into the graph shows

UNITS = ["tok_embeddings", "layers.0", "layers.1", "norm+output"]
NORMS = ["layers.0.attention_norm", "layers.0.ffn_norm", "layers.1.attention_norm", "layers.1.ffn_norm", "norm"]
ADAMW = '[optimizer]\nfactory = "torch.optim:AdamW"\n'


@dataclass(frozen=True)
class Case:
    """A plan's tables, and how eager torch is told the same."""

    tables: str
    optimizers: Sequence[tuple[str, Mapping[str, Any], Any]]
    """(factory, arguments, groups): ``one``, ``unit`` or (arguments of the norms' group, arguments of the rest)."""
    parallel: str = "dp_shard = 4"
    clip_norm: float = 0.0
    model: str = "llama"
    args: Mapping[str, Any] = field(default_factory=lambda: {"layers": 2, "dim": 32})


CASES = {
    "AdamW, clipped": Case(
        f"{ADAMW}args = {{ lr = 0.01 }}\n[step]\nclip_norm = 0.5", [("torch.optim:AdamW", {"lr": 0.01}, "one")], clip_norm=0.5
    ),
    "AdamW, fused, a group an entry": Case(
        f'{ADAMW}args = {{ lr = 0.01, fused = true }}\ngroups = "entry"',
        [("torch.optim:AdamW", {"lr": 0.01, "fused": True}, "unit")],
    ),
    "AdamW, foreach, other weight decay of norms": Case(
        f"{ADAMW}args = {{ lr = 0.01, foreach = true }}\n"
        f"groups = [ {{ params = {NORMS}, weight_decay = 0.0 }}, {{ weight_decay = 0.2 }} ]".replace("'", '"'),
        [("torch.optim:AdamW", {"lr": 0.01, "foreach": True}, ({"weight_decay": 0.0}, {"weight_decay": 0.2}))],
    ),
    "SGD, nesterov": Case(
        '[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.5, momentum = 0.9, nesterov = true, weight_decay = 0.01 }',
        [("torch.optim:SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "one")],
    ),
    "hybrid_shard, Adam with amsgrad, clipped": Case(
        '[optimizer]\nfactory = "torch.optim:Adam"\nargs = { lr = 0.01, amsgrad = true }\n[step]\nclip_norm = 0.5',
        [("torch.optim:Adam", {"lr": 0.01, "amsgrad": True}, "one")],
        'mode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 2',
        clip_norm=0.5,
    ),
    "replicate, AdamW, clipped": Case(
        f"{ADAMW}args = {{ lr = 0.01 }}\n[step]\nclip_norm = 0.5",
        [("torch.optim:AdamW", {"lr": 0.01}, "one")],
        'mode = "replicate"\ndp_replicate = 2',
        clip_norm=0.5,
    ),
    "GPT with LayerNorms, frozen and tied, AdamW": Case(
        f"{ADAMW}args = {{ lr = 0.01 }}",
        [("torch.optim:AdamW", {"lr": 0.01}, "one")],
        model="gpt",
        args={"tied": True, "frozen": ["layers.0.attention_norm"]},
    ),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    pools.start()
    yield pools
    pools.close()


def plan_of(case: Case) -> Plan:
    args = ", ".join(f"{key} = {_toml(value)}" for key, value in case.args.items())
    bucket = f"plan = {UNITS}".replace("'", '"') if case.model == "llama" else 'unplanned = "root"'
    where = f"fixtures.models.{case.model}"
    text = f"""
[model]
factory = "{where}:build"
args = {{ {args} }}
batch = "{where}:batch"
loss = "{where}:loss"
[parallel]
{case.parallel}
[bucket]
{bucket}
{case.tables}
"""
    (plan,) = parse_plans(text, Path("plan.toml"))
    return plan


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


def groups_of(case: Case, fqns: Sequence[str], groups: Any) -> list[tuple[list[str], Mapping[str, Any]]]:
    if groups == "one":
        return [(list(fqns), {})]
    if groups == "unit":
        return [([fqn for fqn in fqns if fqn.startswith(tuple(unit.split("+")))], {}) for unit in UNITS]
    norms = [fqn for fqn in fqns if fqn.rpartition(".")[0] in NORMS]
    return [(norms, groups[0]), ([fqn for fqn in fqns if fqn not in norms], groups[1])]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_captured_step_leaves_what_eager_torch_leaves(case: Case, pools: Pools) -> None:
    plan = plan_of(case)
    world = World(plan, mesh_of(plan), "manual", lambda _: None)
    step = world.step(0)
    shards = plan.parallel.dp_shard
    assert plan.model is not None
    task = Task(
        unbucketed=world.unbucketed(0, "joint"),
        bucketed=world.unbucketed(0, "joint"),
        inputs=step.inputs["joint"],
        outputs=step.outputs["joint"],
        model=plan.model,
        example_inputs=(),
        seed=0,
        steps=STEPS,
        where="plan.toml",
        mesh=world.mesh,
        parallel=plan.parallel,
        parameters=step.parameters,
        optimizing=step.optimizing,
    )
    trainable = [parameter.fqn for parameter in step.parameters if parameter.trainable]
    payload = {
        "task": task,
        "decay": DECAY,
        "shapes": {parameter.fqn: parameter.shape for parameter in step.parameters},
        "shards": shards,
        "steps": STEPS,
        "clip_norm": case.clip_norm,
        "units": [unit.split("+") for unit in UNITS] if case.model == "llama" else [],
        "optimizers": [(name, args, groups_of(case, trainable, groups)) for name, args, groups in case.optimizers],
        **{key: getattr(plan.model, key) for key in ("factory", "batch", "loss")},
        "args": dict(plan.model.args),
    }
    pool = pools.get(world.size)
    paths = [str(HERE), str(ROOT)]
    ours: list[Any] = pool.run("whole_step_jobs:graph_steps", [payload] * world.size, timeout_s=100, paths=paths)
    eager: list[Any] = pool.run("whole_step_jobs:eager_steps", [replaced(payload)] * world.size, timeout_s=100, paths=paths)
    seen = 0
    for rank, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        for number in range(STEPS):
            for what in ("loss", "gradient", "parameter", "state"):
                a, b = (dict(sorted(one[number][what].items())) for one in (mine, theirs))
                assert differing(a, b) == [], f"{what} of rank {rank} in step {number}"
                seen += len(a)
    assert seen >= world.size * STEPS * (1 + 2 * len(trainable))
    assert any(bool((mine[0]["parameter"][fqn] != mine[-1]["parameter"][fqn]).any()) for mine in ours for fqn in trainable[:1])


def replaced(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What eager is told: nothing of ours."""
    return {key: value for key, value in payload.items() if key != "task"}


def test_the_learning_rate_is_an_input_of_the_graph() -> None:
    plan = plan_of(CASES["SGD, nesterov"])
    other = replace(plan, optimizer=(replace(plan.optimizer[0], args={**plan.optimizer[0].args, "lr": 0.25}),))
    graphs = [World(one, mesh_of(one), "manual", lambda _: None).unbucketed(0, "joint") for one in (plan, other)]
    assert graphs[0].rows == graphs[1].rows
    assert torch.float64 in {
        value.dtype for value in World(plan, mesh_of(plan), "manual", lambda _: None).step(0).inputs["joint"]
    }
