"""One visit to a model of the zoo: its items, and its captured gradients beside eager's."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_fxbucket.checks.bitwise.localise import bits
from pytest_fxbucket.cli.first_entries import draft
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.toml_text import to_toml
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.roles import Parameter
from pytest_fxbucket.step_runner import StepTask, fields_of, state_and_batches, update
from suites.zoo.eager import eager_steps
from suites.zoo.lockstep import run_together
from suites.zoo.shelf import ZooModel

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 2, 2
ROWS = ("fp32", "bf16")
ITEMS = ("audit", "collectives", "bitwise")
MOST_ULPS = 16.0
"""Of a gradient's largest element, that rounding in another order may come to."""


@dataclass(frozen=True)
class Outcome:
    """What one row of one model came to."""

    model: str
    library: str
    row: str
    kind: str
    """green; near: but for rounding, for a named reason; refused: a sentence says why; red: an item failed; parted: eager has
    other gradients; raw: no sentence of ours."""
    said: str
    """The sentence, or what was compared."""
    nearness: float = 0.0
    """How far gradients are from eager's, in units in the last place of each gradient's largest element; 0: the same bits."""
    audited: str = ""
    """What audit said, if it was green."""


def plans_of(model: ZooModel) -> dict[str, Plan]:
    """The plan of each row. Raises FxbucketError where a plan cannot be made."""
    bucket: dict[str, object] = {}
    if model.plan is None:
        torch.manual_seed(0)
        drafted = draft(model.build())
        bucket = {"plan": list(drafted.entries), "unplanned": drafted.unplanned}
    else:
        bucket = {"plan": list(model.plan)}
    named = {key: f"{model.module}:SHELF.{model.name}.{key}" for key in ("build", "batch", "loss")}
    tables: dict[str, dict[str, object]] = {
        "model": {"factory": named["build"], "batch": named["batch"]},
        "parallel": {"dp_shard": RANKS},
        "bucket": bucket,
        "run": {"steps": STEPS, "timeout_s": 120},
    }
    if model.loss is not None:
        tables["model"]["loss"] = named["loss"]
    for table, more in model.tables.items():
        tables[table] = {**tables.get(table, {}), **more}
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {to_toml(value)}\n" for key, value in keys.items()) for table, keys in tables.items()
    )
    text += '[[matrix]]\nid = "bf16"\nparallel.param_dtype = "bfloat16"\nparallel.reduce_dtype = "float32"\n'
    return dict(zip(ROWS, parse_plans(text, ROOT / "suites" / "zoo" / f"{model.name}.toml"), strict=True))


def run_of(plan: Plan, pools: Pools, artifacts: Path) -> PlanRun:
    """All ranks in one process."""
    return PlanRun(plan, RunSettings(ROOT, artifacts / "golden", artifacts, backend="local"), pools)


def visit(model: ZooModel, row: str, pools: Pools, artifacts: Path, items: Sequence[str]) -> Outcome:
    """Check one row of one model: ``items``, then its captured step beside eager."""
    green: dict[str, str] = {}

    def outcome(kind: str, said: str, nearness: float = 0.0) -> Outcome:
        return Outcome(model.name, model.library, row, kind, said, nearness, green.get("audit", ""))

    try:
        plan = plans_of(model)[row]
    except Exception as error:
        return outcome("raw", f"no plan: {type(error).__name__}: {error}")
    try:
        run = run_of(plan, pools, artifacts)
        for item in items:
            verdict = run.check(item)
            if not verdict:
                return outcome("red", f"{item}: {verdict.summary}: {' | '.join(verdict.lines[:4])}")
            green[item] = verdict.summary
        return _beside_eager(model, run, plan, outcome)
    except FxbucketError as error:
        if "eager" in str(error) and (said := _refuted(model, plan)):
            return outcome("red", f"{said}: {error}")
        return outcome("refused", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return outcome("raw", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


def _beside_eager(model: ZooModel, run: PlanRun, plan: Plan, outcome: Callable[..., Outcome]) -> Outcome:
    captured, parallel = captured_steps(run, plan), plan.parallel
    eps = torch.finfo(getattr(torch, parallel.param_dtype or "float32")).eps

    def beside(captured: list[list[dict[str, Any]]]) -> tuple[list[tuple[str, float]], int]:
        eager = eager_steps(model, plan, RANKS, STEPS)
        return list(_differences(captured, eager, run.world.step(0).parameters, eps)), len(eager[0]["gradients"])

    try:
        found, gradients = beside(captured)
    except Exception as error:
        return outcome("parted", f"eager itself raises {type(error).__name__}: {str(error).splitlines()[0]}", float("inf"))
    same = f"{gradients} gradients of {STEPS} steps bit for bit those of eager"
    if not found:
        return outcome("green", same)
    worst = max(nearness for _, nearness in found)
    if model.as_traced is not None:
        with model.as_traced():
            if not beside(captured_steps(run, plan))[0]:
                # How near is told by the first step: by the second a router may choose another expert.
                first = max((nearness for text, nearness in found if text.startswith("step 0")), default=0.0)
                return outcome("green", f"{same} that goes the traced way", first or worst)
    if model.near and worst <= MOST_ULPS:
        return outcome(
            "near", f"{gradients} gradients of {STEPS} steps within {worst:.1f} ULPs of eager's: {model.rounds}", worst
        )
    return outcome("parted", f"{len(found)} of {2 * gradients + 4}: " + "; ".join(text for text, _ in found[:6]), worst)


def _refuted(model: ZooModel, plan: Plan) -> str:
    """What speaks against a sentence that eager refuses, too; empty if nothing does."""
    try:
        eager_steps(model, plan, RANKS, STEPS)
    except Exception:
        return ""
    return "eager runs what is said to be refused by eager, too"


def captured_steps(run: PlanRun, plan: Plan) -> list[list[dict[str, Any]]]:
    """By step and rank the loss, and this rank's part of each gradient, of the captured, unbucketed step."""
    world = run.world
    step = world.reference(0)
    stepping = StepTask(**fields_of(plan, world.mesh, step, "joint"))
    graph = step.graphs["joint"]
    states, batches = zip(*(state_and_batches(rank, stepping) for rank in range(RANKS)), strict=True)
    steps = []
    for number in range(STEPS):
        inputs = [[*state, *batch(number)] for state, batch in zip(states, batches, strict=True)]
        results = run_together(graph, inputs, stepping.seed + number)
        found = []
        for state, result in zip(states, results, strict=True):
            made = {
                v.fqn: one.detach().clone() for v, one in zip(step.outputs["joint"], result, strict=True) if v.role != "state"
            }
            found.append({"loss": made.pop(""), "gradients": made})
            update(state, result, stepping)
        steps.append(found)
    return steps


def _differences(
    captured: list[list[dict[str, Any]]], eager: list[dict[str, Any]], parameters: Sequence[Parameter], eps: float
) -> Iterator[tuple[str, float]]:
    shapes = {parameter.fqn: parameter.shape for parameter in parameters}
    for number, (ranks, theirs) in enumerate(zip(captured, eager, strict=True)):
        for rank, loss in enumerate(theirs["losses"]):
            yield from _difference(f"step {number}, loss of rank {rank}", ranks[rank]["loss"], loss, eps)
        names = set(theirs["gradients"])
        ours = {name: [rank["gradients"][name] for rank in ranks] for name in ranks[0]["gradients"]}
        for name in sorted(names ^ set(ours)):
            yield f"step {number}: only {'eager' if name in names else 'capture'} has a gradient of {name}", float("inf")
        for name, gradient in theirs["gradients"].items():
            if name in ours:
                yield from _difference(f"step {number}, {name}", _whole(ours[name], shapes[name]), gradient, eps)


def _whole(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat(parts)[: shape[0]] if shape else parts[0].reshape(())


def _difference(what: str, a: Tensor, b: Tensor, eps: float) -> Iterator[tuple[str, float]]:
    if a.shape != b.shape or a.dtype != b.dtype:
        yield f"{what}: {a.dtype} {tuple(a.shape)} for eager's {b.dtype} {tuple(b.shape)}", float("inf")
    elif not torch.equal(bits(a), bits(b)) and not torch.equal(a, b):
        largest = float(b.abs().max())
        apart = float((a - b).abs().max()) / (largest * eps) if largest else float("inf")
        yield f"{what}: {apart:.3g} ULPs", apart
