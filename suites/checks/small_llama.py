"""A Llama of two layers on some ranks, captured once, and its plan run through any pass."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.golden.store import render
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.plans.llama import llama


def make_project(folder: Path, ranks: int = 4, **parallel: object) -> Path:
    """Write the plan and the broken passes into ``folder``; returns the plan's path."""
    path = folder / "small.toml"
    text = llama("layers = 2, dim = 32, heads = 2, kv_heads = 1", ranks, **parallel)
    path.write_text(text + "[run]\nsteps = 2\ntimeout_s = 60\n")
    for name in ("broken_passes.py", "bucketed_llama.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    return path


@dataclass
class SmallLlama:
    """One capture, shared by runs of the plan through any number of passes; its golden is that of our pass."""

    plan: Plan
    pools: Pools
    captured: PlanOnMesh

    @classmethod
    def make(cls, folder: Path, pools: Pools, ranks: int = 4, **parallel: object) -> SmallLlama:
        plan = load_plans(make_project(folder, ranks, **parallel))[0]
        made = cls(plan, pools, PlanOnMesh(CapturedPlan(plan, mesh_of(plan), print), "manual"))
        made.captured.reading(0)
        return made

    def run(self, pass_name: str, accept: str | None = None) -> PlanRun:
        folder = self.plan.path.parent
        settings = RunSettings(folder, folder / "golden", folder / "artifacts", pass_name, accept=accept)
        run = PlanRun(self.plan, settings, self.pools, accept_golden=write_golden)
        run.__dict__["_mesh_world"] = self.captured.by_pass(pass_name)
        return run


def write_golden(path: Path, text: str) -> None:
    assert text.startswith(render("")[:10])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
