"""A plan's captured, unbucketed step and its eager reference, run on the same ranks and compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode_module
from pytest_fxbucket.step.roles import StepGraph
from suites.capture.functional_graphs import same

STEPS = 2
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLANS = {
    plan.path.stem + (f".{plan.matrix_id}" if plan.matrix_id else ""): plan
    for path in sorted((ROOT / "fixtures" / "plans").glob("*.toml"))
    for plan in load_plans(path)
    # A plan on a smaller mesh than its own is one of the others with more layers; optimizers have tests of their own.
    if plan.model is not None and plan.run_world == plan.world_size and not plan.optimizer
}
BY_ROWS = ("fully_shard", "hybrid_shard", "fixtures.modes:predivided")
"""Modes that shard on dimension 0, and pad."""


def small(name: str, args: Any = (("layers", 1), ("dim", 16)), **parallel: Any) -> Plan:
    """The plan called ``name`` with one layer, or other ``args`` of its model, and other values in its ``[parallel]``."""
    plan = PLANS[name]
    assert plan.model is not None
    return replace(
        plan,
        model=replace(plan.model, args=dict(args)),
        parallel=replace(plan.parallel, **parallel),
        bucket=replace(plan.bucket, plan=tuple(entry for entry in plan.bucket.plan if entry.name != "layers.1")),
    )


def step_of(plan: Plan) -> StepGraph:
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual").step(0)


def payload_of(plan: Plan, step: StepGraph, **changes: Any) -> dict[str, Any]:
    """What the graph and every reference need."""
    assert plan.model is not None
    mesh = {name: size for name, size in plan.degrees.items() if size > 1}
    found = {
        "factory": plan.model.factory,
        "args": dict(plan.model.args),
        "batch": plan.model.batch,
        "loss": plan.model.loss,
        "seed": plan.run.seed,
        "steps": STEPS,
        "lr": 0.1,
        "microbatches": plan.step.microbatches,
        "data_rank": [rank // (plan.parallel.cp * plan.parallel.tp) for rank in range(plan.world_size)],
        "mesh": mesh,
        "tp_plan": {fqn: style for of, style in plan.parallel.tp_plan.items() for fqn in _named(of, step)},
        "checkpoint": [fqn for entry in plan.step.checkpoint for of in entry.selectors for fqn in _named(of, step)],
        "units": [[fqn for fqn in entry.selectors if fqn in step.modules] for entry in plan.bucket.plan],
        "param_dtype": plan.parallel.param_dtype,
        "reduce_dtype": plan.parallel.reduce_dtype,
        "reshard_after_forward": _of_all(plan.parallel.reshard_after_forward),
        "graph": encode_module(step.graphs["joint"]),
        "inputs": step.inputs["joint"],
        "outputs": step.outputs["joint"],
        "parameters": step.parameters,
        "capture_mesh": mesh_of(plan),
        "parallel": plan.parallel,
        "first_state": step.first_state,
        "by_rows": plan.parallel.mode in BY_ROWS,
    }
    return found | changes


def _of_all(asked: object) -> bool | None:
    """What FSDP2 takes for all of a model's units; of a table by unit its default, since bits are the same."""
    return asked if isinstance(asked, bool) else None


def _named(selector: str, step: StepGraph) -> list[str]:
    return [fqn for fqn in step.modules if fnmatch(fqn, selector) and fqn.count(".") == selector.count(".")]


def by_hand(plan: Plan, *averages: str, share: tuple[int, int, Sequence[int]] | None) -> dict[str, Any]:
    """Further keys of ``by_hand_steps``: gradients averaged along the dimensions ``averages`` in turn."""
    return {"averages": [partition(plan, name) for name in averages], "share": share}


def partition(plan: Plan, *along: str) -> list[list[int]]:
    """All ranks in groups along dimensions of the mesh, of which the last counts fastest."""
    names = [name for name, size in plan.degrees.items() if size > 1]
    ranks = torch.arange(plan.world_size).view([plan.degrees[name] for name in names])
    ranks = ranks.movedim([names.index(name) for name in along], list(range(-len(along), 0)))
    groups: list[list[int]] = ranks.reshape(-1, prod(plan.degrees[name] for name in along)).tolist()
    return groups


def run(pools: Pools, job: str, payload: Mapping[str, Any]) -> list[Any]:
    """What ``job`` gives on each rank."""
    return run_each(pools, job, [payload] * len(payload["data_rank"]))


def run_each(pools: Pools, job: str, payloads: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What ``job`` gives on each rank, of one process, for the payload in its place."""
    results: list[Any] = pools.get(len(payloads), "local").run(job, payloads, timeout_s=60, paths=[str(HERE), str(ROOT)])
    return results


def assert_same(pools: Pools, payload: Mapping[str, Any], reference: str, **other: Any) -> list[Any]:
    """What the graph gives on each rank; ``fixtures.reference``'s function gives the same bits for ``payload | other``."""
    ours = run(pools, "parity_jobs:graph_steps", payload)
    eager = run(pools, f"fixtures.reference.{reference}", {**payload, **other})
    found = list(differences(ours, eager))
    assert not found, "; ".join(found[:12])
    return ours


def differences(ours: Sequence[Any], eager: Sequence[Any]) -> Iterator[str]:
    """Each step and rank, and what differs there."""
    for rank, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        for step, (a, b) in enumerate(zip(mine["steps"], theirs["steps"], strict=True)):
            yield from (f"step {step}, rank {rank}: {name}" for name in differing({"loss": a["loss"]}, {"loss": b["loss"]}))
            yield from (f"step {step}, rank {rank}: gradient {name}" for name in differing(a["gradients"], b["gradients"]))
        for role in ("parameters", "buffers"):
            yield from (f"after, rank {rank}: {role} {name}" for name in differing(mine[role], theirs[role]))


def differing(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> list[str]:
    """Names of what is not equal, shape, dtype and bits."""
    if list(ours) != list(eager):
        return [f"names {list(ours)} and {list(eager)}"]
    return [name for name in ours if not same([ours[name]], [eager[name]])]
