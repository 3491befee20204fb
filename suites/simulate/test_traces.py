"""A trace of torch's profiler calibrates; one of another graph, or of another kind of machine, is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

from pytest_fxbucket.cost.costs import collective_seconds, launched_bytes
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.simulate.traces import cluster_from_trace
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.handmade import Handmade, aten
from suites.simulate.test_calibrate import ASSUMED, nodes_of, step_of

HOST = replace(ASSUMED, blocking=True)


def computing(rounds: int = 8, last: Any = aten.tanh.default) -> StepGraph:
    """Products, views and sums, without communication."""
    made = Handmade()
    value = made.batch(128, 128)
    for _ in range(rounds):
        turned = made.call(aten.t.default, made.call(aten.mm.default, value, value))
        value = made.call(aten.add.Tensor, turned, value)
    made.returns(made.call(last, value))
    module = fx.GraphModule(torch.nn.Module(), made.finish())
    return replace(step_of((64,)), graphs={"joint": module}, inputs={"joint": tuple(made.inputs)}, outputs={"joint": ()})


def profiled(step: StepGraph, folder: Path, steps: int = 3) -> Path:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.zeros(3).sum()
        for _ in range(steps):
            step.graphs["joint"](torch.zeros(128, 128))
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return folder / "trace.json"


def test_a_trace_of_the_profiler_calibrates(tmp_path: Path) -> None:
    step = computing()
    found = cluster_from_trace(profiled(step, tmp_path), step, HOST)
    assert found.errors["compute"].count == 8 * 3 + 1
    assert found.unmatched == ()
    trace = json.loads((tmp_path / "trace.json").read_text())
    tops = sorted(event["ts"] for event in trace["traceEvents"] if event.get("name") in ("aten::mm", "aten::tanh"))
    took = sorted((tops[9 * n + 8] - tops[9 * n]) / 1e6 for n in range(3))
    assert took[0] / 3 < simulate(step, found.cluster).seconds < 3 * took[-1]


def test_a_trace_of_another_graph_is_refused(tmp_path: Path) -> None:
    path = profiled(computing(), tmp_path)
    words = rf"^{path}: the trace is of another graph: it has 10 calls more, first of aten::tanh$"  # ends of steps
    with pytest.raises(SimulationError, match=words):
        cluster_from_trace(path, computing(20), HOST)
    words = (
        rf"^{path}: the trace is of another graph: behind add_tensor_23 is no call of aten::mm, as mm_default_24 of the joint "
    )
    with pytest.raises(SimulationError, match=words):
        cluster_from_trace(path, computing(40), HOST)


def test_an_operator_that_the_trace_lacks_is_said(tmp_path: Path) -> None:
    found = cluster_from_trace(profiled(computing(), tmp_path), computing(last=aten.sin.default), HOST)
    assert found.unmatched == ("1 node not in the trace, first sin_default",)


def written(folder: Path, events: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "args": {}} | dict(event) for event in events]}))
    return path


def name_of(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0].replace(".", "::")


def test_kernels_are_of_the_call_that_launched_them_and_collectives_of_nccl(tmp_path: Path) -> None:
    step, events = step_of((64, 512)), []
    for number, node in enumerate(nodes_of(step)):
        name, at = name_of(node), number * 10.0
        events.append({"cat": "cpu_op", "name": name, "ts": at, "dur": 8, "tid": 1})
        events.append({"cat": "cpu_op", "name": "aten::mm", "ts": at + 1, "dur": 1, "tid": 1})
        if name in ("aten::t", "_c10d_functional::wait_tensor"):
            continue
        kernel, took = "gemm", 50.0
        if "gather" in name:
            kernel, took = "ncclDevKernel_AllGather", 100 + launched_bytes(node) / 1e3  # a nanosecond for a byte
        events.append(
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 3, "tid": 1, "args": {"correlation": number}}
        )
        work = {"cat": "kernel", "name": kernel, "ts": 1000 + at, "dur": took, "tid": 7, "args": {"correlation": number}}
        events.append(work)
        if "gather" in name:  # what NCCL is given is copied first
            events.append(work | {"name": "copy", "dur": 5000})
    found = cluster_from_trace(written(tmp_path, events), step, ASSUMED)
    assert found.errors["collectives"].most < 0.02
    assert collective_seconds("all_gather", 0, range(4), found.cluster) == pytest.approx(100e-6, rel=0.05)
    assert found.unmatched == ()
    assert found.cluster.least == pytest.approx(50e-6)
    assert found.cluster.launch == pytest.approx(10e-6, rel=0.05)
    assert found.cluster.view == pytest.approx(10e-6, rel=0.05)


def test_threads_of_gloo_say_how_long_collectives_take(tmp_path: Path) -> None:
    step, events = step_of((64, 512)), []
    for number, node in enumerate(nodes_of(step)):
        name, at = name_of(node), number * 10.0
        events.append({"cat": "cpu_op", "name": name, "ts": at, "dur": 8, "tid": 1})
        if "gather" in name:
            took = 100 + launched_bytes(node) / 1e3
            events.append({"cat": "user_annotation", "name": "gloo:all_gather", "ts": at + 9, "dur": took, "tid": 2})
            events.append({"cat": "cpu_op", "name": "aten::mm", "ts": at + 10, "dur": 1, "tid": 2})
    found = cluster_from_trace(written(tmp_path, events), step, HOST)
    assert found.errors["collectives"].count == 4
    assert found.errors["collectives"].most < 0.02
    assert found.unmatched == ()


def test_of_several_steps_the_middle_counts(tmp_path: Path) -> None:
    step, events, at = computing(), [], 0.0
    for pace in (90.0, 20.0, 10.0):
        for node in nodes_of(step):
            events.append({"cat": "cpu_op", "name": name_of(node), "ts": at, "dur": 5, "tid": 1})
            at += pace
    found = cluster_from_trace(written(tmp_path, events), step, HOST)
    assert found.cluster.view == pytest.approx(20e-6, rel=0.01)


@pytest.mark.parametrize(
    ("events", "cluster", "words"),
    [
        ([{"cat": "kernel", "name": "k", "ts": 0}], HOST, "has kernels of a device, but assumed computes on the host$"),
        (
            [{"cat": "cpu_op", "name": "aten::mm", "ts": 0}],
            ASSUMED,
            "has no kernels of a device, but assumed computes on devices$",
        ),
        (
            [{"cat": "cpu_op", "name": "aten::mm", "ts": "x"}],
            HOST,
            "is no trace of a report, nor one that torch.profiler's export_chrome_trace wrote$",
        ),
        (
            [{"cat": "cpu_op", "name": "aten::mm", "ts": 0}],
            HOST,
            "is of another graph: in it is no call of _c10d_functional::.*$",
        ),
    ],
)
def test_other_traces_are_refused(events: list[dict[str, Any]], cluster: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=words):
        cluster_from_trace(written(tmp_path, events), step_of((64,)), cluster)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"none\.json cannot be read: No such file or directory$"):
        cluster_from_trace(tmp_path / "none.json", step_of((64,)), HOST)
