"""Prints what capture costs: the trace of 126 Llama layers of a 405B shape, and of 24 beside plain make_fx.

Fake tensors on a mesh of 512 ranks, one sequence of 8,192 tokens, forward and backward. Seconds of this process on a core,
which other work on a shared machine disturbs least, and of the clock; memory is the peak of the process. The trace, and make_fx
of the same joint function without names, resharding and recompile, are taken in turns. ``make bench``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fixtures.models.llama import build, loss
from pytest_fxbucket.capture import joint
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.capture.parallel.forwards import forwards_of
from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.mesh import fake_mesh
from suites.plans.llama import MIXED, llama

DEEP, SHORT, TURNS = 126, 24, 3
SHAPE = {"dim": 16384, "heads": 128, "kv_heads": 8, "vocab": 128256}
AIMS = {"seconds": 10, "gib": 6, "ratio": 1.1}


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.zeros(1, 8192, dtype=torch.int64),)


def plan_of(layers: int) -> Plan:
    """A 405B shape but for its depth, on 512 ranks."""
    args = ", ".join(f"{key} = {value}" for key, value in {"layers": layers, **SHAPE}.items())
    text = llama(args, 512, batch="suites.benchmarks.capture:batch", **MIXED)
    return parse_plans(text, Path("llama405b.toml"))[0]


def main() -> None:
    """Print one row a figure."""
    deep()
    against_make_fx()


def deep() -> None:
    """From the plan to the graph, imports and all."""
    plan = plan_of(DEEP)
    begin, clock = time.process_time(), time.perf_counter()
    step = capture_plan(plan, mesh_of(plan), 0)
    seconds, passed = time.process_time() - begin, time.perf_counter() - clock
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    nodes = len(step.graphs["joint"].graph.nodes)
    print(f"{DEEP} layers, {nodes:,} nodes")
    print(f"{seconds:6.2f} s, {passed:.2f} s of the clock, to stay under {AIMS['seconds']}")
    print(f"{gib:6.2f} GiB, to stay under {AIMS['gib']}", flush=True)


def against_make_fx() -> None:
    """Best of several, in turns."""
    plan = plan_of(SHORT)
    mesh, mode = mesh_of(plan), FakeTensorMode()
    with mode:
        model = build(SHORT, **SHAPE)
    runs: dict[str, Callable[[], Any]] = {
        "make_fx": lambda: plain(plan, model, mode),
        "trace": lambda: captured(plan, model, mode),
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            with fake_mesh(mesh, 0):
                begin = time.process_time()
                run()
                spent[name].append(time.process_time() - begin)
    for name, found in spent.items():
        print(f"{SHORT} layers, {name:7} {min(found):6.2f} s ({', '.join(f'{s:.2f}' for s in found)})")
    ratio = min(spent["trace"]) / min(spent["make_fx"])
    print(f"{ratio:6.2f} times make_fx, to stay under {AIMS['ratio']}")


def captured(plan: Plan, model: torch.nn.Module, mode: FakeTensorMode) -> Any:
    """The joint graph as capture makes it."""
    parts, forwards = ParameterShards.of(plan.parallel, mesh_of(plan)), forwards_of(model, plan)
    return joint.trace_joint(model, lambda: joint.JointStep(model, batch(0, 0), loss, parts, forwards, mode))


def plain(plan: Plan, model: torch.nn.Module, mode: FakeTensorMode) -> Any:
    """make_fx of the same function, and nothing else."""
    parts, forwards = ParameterShards.of(plan.parallel, mesh_of(plan)), forwards_of(model, plan)
    with mock.patch.object(joint, "NodeNamer", _Nobody):
        step = joint.JointStep(model, batch(0, 0), loss, parts, forwards, mode)
    with mode:
        return tracing.trace(step, step.inputs)


class _Nobody(NodeNamer):
    """Names nothing, and has no hooks."""

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        yield

    @contextmanager
    def inside(self, fqn: str) -> Iterator[None]:
        yield

    def start_backward(self, loss: Tensor) -> None: ...

    def end_backward(self) -> None: ...


if __name__ == "__main__":
    main()
