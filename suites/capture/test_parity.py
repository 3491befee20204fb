"""The captured, unbucketed step against torch's own fully_shard on the same ranks: every check stands on this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.mesh import shard_mesh
from pytest_fxbucket.capture.roles import StepGraph
from pytest_fxbucket.graph.portable import encode_module
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.world import World

RANKS = 4
STEPS = 3
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLANS = {
    plan.path.stem + (f".{plan.matrix_id}" if plan.matrix_id else ""): plan
    for path in sorted((ROOT / "fixtures" / "plans").glob("*.toml"))
    for plan in load_plans(path)
    # a plan on a smaller mesh than its own is one of the others with more layers
    if plan.model is not None and plan.run_world == plan.world_size
}


def changed(name: str, **parallel: Any) -> Plan:
    return replace(PLANS[name], parallel=replace(PLANS[name].parallel, **parallel))


def of_two_layers(plan: Plan) -> Plan:
    """``plan`` with 2 layers: more of the same say nothing new."""
    assert plan.model is not None
    if "layers" not in plan.model.args:
        return plan
    entries = tuple(entry for entry in plan.bucket.plan if not re.fullmatch(r"layers\.([2-9]|\d\d+)", entry.name))
    model = replace(plan.model, args={**plan.model.args, "layers": 2})
    return replace(plan, model=model, bucket=replace(plan.bucket, plan=entries))


CASES = {
    name: of_two_layers(plan)
    for name, plan in {
        **PLANS,
        "llama: bfloat16 reduction": changed("llama", reduce_dtype=None),
        "llama: float32 parameters, bfloat16 reduction": changed("llama", param_dtype=None, reduce_dtype="bfloat16"),
        "llama_tied: kept": changed("llama_tied", reshard_after_forward=False),
        "uneven: bfloat16 inputs and parameters": changed("uneven", param_dtype="bfloat16", reduce_dtype="float32"),
        "uneven: kept": changed("uneven", reshard_after_forward=False),
        "hf_llama: float32, kept": changed("hf_llama", param_dtype=None, reduce_dtype=None, reshard_after_forward=False),
    }.items()
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    pools.start()
    yield pools
    pools.close()


def payload_of(plan: Plan, step: StepGraph) -> dict[str, Any]:
    assert plan.model is not None
    return {
        "factory": plan.model.factory,
        "args": dict(plan.model.args),
        "batch": plan.model.batch,
        "loss": plan.model.loss,
        "seed": plan.run.seed,
        "steps": STEPS,
        "lr": 0.1,
        "units": [list(entry.selectors) for entry in plan.bucket.plan],
        "param_dtype": plan.parallel.param_dtype,
        "reduce_dtype": plan.parallel.reduce_dtype,
        "reshard_after_forward": plan.parallel.reshard_after_forward,
        "graph": encode_module(step.graphs["joint"]),
        "inputs": step.inputs["joint"],
        "outputs": step.outputs["joint"],
        "shapes": {parameter.fqn: parameter.shape for parameter in step.parameters},
    }


def differing(ours: Any, eager: Any) -> list[str]:
    """Names of what is not equal, shape, dtype and bits."""
    if list(ours) != list(eager):
        return [f"names {list(ours)} and {list(eager)}"]
    return [name for name in ours if ours[name].dtype != eager[name].dtype or not _same_bits(ours[name], eager[name])]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("plan", CASES.values(), ids=CASES.keys())
def test_the_traced_step_is_the_step_that_fully_shard_takes(plan: Plan, pools: Pools) -> None:
    payload = payload_of(plan, World(plan, shard_mesh(RANKS), "manual", lambda _: None).step(0))
    pool = pools.get(RANKS)
    ours = pool.run("parity_jobs:graph_steps", [payload] * RANKS, timeout_s=60, paths=[str(HERE), str(ROOT)])
    eager: list[Any] = pool.run("fixtures.reference:fsdp2_steps", [payload] * RANKS, timeout_s=60, paths=[str(ROOT)])
    for rank, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        for step in range(STEPS):
            a, b = mine["steps"][step], theirs["steps"][step]
            assert differing({"loss": a["loss"]}, {"loss": b["loss"]}) == [], f"loss of rank {rank} in step {step}"
            assert differing(a["gradients"], b["gradients"]) == [], f"gradients of rank {rank} in step {step}"
        assert differing(mine["parameters"], theirs["parameters"]) == [], f"parameters of rank {rank}"


def test_every_model_of_the_fixtures_is_compared() -> None:
    models = {f"fixtures.models.{path.stem}" for path in (ROOT / "fixtures" / "models").glob("*.py")}
    compared = {plan.model.factory.partition(":")[0] for plan in CASES.values() if plan.model is not None}
    assert models - {"fixtures.models.__init__", "fixtures.models.traced"} == compared
