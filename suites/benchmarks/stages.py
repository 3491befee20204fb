"""Prints what pipeline stages cost at size: 126 Llama layers in 64 stages, and 64 layers in 64 stages on 4,096 ranks.

Small layers, since size is of the graph. Seconds of this process on a core; memory is the peak of the
process. ``make bench``.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

from pytest_fxbucket.capture.from_plan import ModelTraced, capture_plan
from pytest_fxbucket.pipeline import captured
from pytest_fxbucket.pipeline.microbatch import Microbatch, trace_microbatch
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.mesh import fake_mesh
from suites.plans.llama import llama

DEEP, STAGES, BESIDE = 126, 64, 64
AIM = 5
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def plan_of(layers: int, stages: int, beside: int) -> Plan:
    """One microbatch: the step that is not in stages grows with them, its stages do not."""
    cuts = [f"layers.{(stage + 1) * layers // stages - 1}" for stage in range(stages - 1)]
    text = llama(f"layers = {layers}, dim = 32", beside, pp=stages)
    return parse_plans(f'{text}[pipeline]\ncuts = {cuts!r}\nschedule = "GPipe"\n', Path("stages.toml"))[0]


def main() -> None:
    """Print one row a figure."""
    cutting(DEEP, STAGES)
    checks(STAGES, BESIDE)


def cutting(layers: int, stages: int) -> None:
    """What stages cost beyond a trace."""
    plan = plan_of(layers, stages, 1)
    mesh = mesh_of(plan)
    whole = clock("the step, not in stages", lambda: capture_plan(plan, mesh, 0))
    begin, traced = time.process_time(), list[float]()

    def trace(model: ModelTraced) -> Microbatch:
        found = clock("trace of a microbatch", lambda: trace_microbatch(model))
        traced.append(time.process_time() - begin)
        return found

    with mock.patch.object(captured, "trace_microbatch", trace):
        staged = captured.capture_stages(plan, mesh, whole)
    beyond = time.process_time() - begin - traced[0]
    print(f"{layers} layers cut into {stages} stages: {beyond:.2f} s beyond that trace", flush=True)
    with fake_mesh(mesh, 0):
        clock("graphs of one rank", lambda: staged.of_rank(mesh, 0))
        clock("graphs of all other ranks", lambda: [staged.of_rank(mesh, rank) for rank in mesh.ranks(0, "pp")[1:]])
    print(f"cutting and one rank's graphs are to stay under {AIM} s", flush=True)


def checks(stages: int, beside: int) -> None:
    """Of a plan with as many layers as stages, each beside ``beside`` ranks."""
    plan = plan_of(stages, stages, beside)
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(ROOT, Path(folder) / "golden", Path(folder) / "artifacts", accept="all")
        run = PlanRun(plan, settings, Pools(), accept_golden=lambda path, text: None)
        clock(f"the step of {plan.world_size:,} ranks", lambda: run.step)
        for name in ("audit", "collectives", "golden"):
            verdict = clock(name, lambda name=name: run.check(name))  # type: ignore[misc]  # bound at once
            print(f"{name} {verdict.outcome}: {verdict.summary}", flush=True)


def clock(name: str, work: Callable[[], T]) -> T:
    """One row."""
    begin = time.process_time()
    result = work()
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name:28} {time.process_time() - begin:7.2f} s, {gib:.2f} GiB", flush=True)
    return result


if __name__ == "__main__":
    main()
