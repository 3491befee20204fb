"""Prints what our pass costs beside torch's, how it grows with the graph, and what the checks that read graphs cost.

Joint graphs of a decoder with nine parameters a layer, really traced. Both passes in one run, in turns, best of several;
torch's with only its cost estimate patched to give 0.0. The closing recompile and lint of the whole graph are timed apart: they
are the floor. memory: the peak of what Python allocates inside the pass over that of a deepcopy of the graph. view: a GraphView
over one walk over nodes, inputs and users. Seconds of this process on a core, which other work on a shared machine disturbs
least; all of it is single-threaded. ``make bench``.
"""

from __future__ import annotations

import copy
import gc
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from statistics import linear_regression
from typing import Any
from unittest import mock

from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.promises.expectations import promise_of
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.torch_pass import torch_manual_overlap_bucketing
from pytest_fxbucket.golden.schedule import schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.calls import calls_of
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.graph_view import GraphView
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.result import Passed
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.process import collector
from pytest_fxbucket.same.step import GraphSide, compared
from pytest_fxbucket.same.table import ExpressionTable
from pytest_fxbucket.step.mesh import shard_mesh
from suites.benchmarks.decoder import RANKS, plan_of

COMPARED = (80, 160)
GROWTH = (18, 38, 80, 170, 360)
TURNS = 3
AIMS = {"without": 20, "with": 8, "growth": 1.1, "memory": 1.5}


def main() -> None:
    """Print one row a figure."""
    print("seconds of a pass, + of the closing recompile and lint; ratios without and with these")
    print(f"{'layers':>6} {'nodes':>7} {'torch':>14} {'ours':>14} {'ratios':>12}")
    for layers in COMPARED:
        compare(Graphs(layers))
    print(f"\nseconds by size, and x of nodes^x, to stay under {AIMS['growth']}; memory, to stay under {AIMS['memory']}")
    print(f"{'nodes':>8}" + "".join(f"{name:>12}" for name in (*ROWS, "memory", "view")))
    sizes, seconds = list[int](), list[list[float]]()
    for layers in GROWTH:
        graphs = Graphs(layers)
        sizes.append(graphs.nodes)
        seconds.append([best(work, graphs) for work in ROWS.values()])
        row = "".join(f"{s:12.3f}" for s in seconds[-1])
        print(f"{graphs.nodes:8,}{row}{memory(graphs):12.2f}{view(graphs):12.2f}", flush=True)
    print(f"{'x':>8}" + "".join(f"{slope(sizes, column):12.2f}" for column in zip(*seconds, strict=True)))


class Graphs:
    """One captured step, before and after our pass."""

    def __init__(self, layers: int) -> None:
        self.layers, self.plan = layers, plan_of(layers)
        self.world = PlanOnMesh(CapturedPlan(self.plan, shard_mesh(RANKS)), "manual")
        self.step = self.world.step(0)
        self.gm = self.step.graphs["joint"]

    @cached_property
    def passed(self) -> Passed:
        return self.world.passed(0)["joint"]

    @property
    def nodes(self) -> int:
        return len(self.gm.graph.nodes)

    @property
    def entries(self) -> list[str]:
        return ["tok_embeddings", *(f"layers.{i}" for i in range(self.layers)), "output"]

    def fresh(self) -> fx.GraphModule:
        """A copy for a pass to change."""
        return fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))


Pass = Callable[[fx.GraphModule, list[str]], fx.GraphModule]


def compare(graphs: Graphs) -> None:
    """One row: both passes on the same graph, in turns."""
    runs: dict[Pass, list[tuple[float, float]]] = {torch_manual_overlap_bucketing: [], manual_overlap_bucketing: []}
    for turn in range(TURNS):
        for run in runs if turn < 2 else [manual_overlap_bucketing]:
            runs[run].append(timed(graphs, run))
    (torchs, torch_closing), (ours, closing) = (min(found) for found in runs.values())
    print(
        f"{graphs.layers:6} {graphs.nodes:7,} {torchs:7.2f} + {torch_closing:4.2f} {ours:7.3f} + {closing:4.2f}"
        f" {torchs / ours:6.1f}, {(torchs + torch_closing) / (ours + closing):4.1f},"
        f" to reach {AIMS['without']}, {AIMS['with']}",
        flush=True,
    )


def timed(graphs: Graphs, run: Pass) -> tuple[float, float]:
    """Seconds of a pass without the recompile and lint of the whole graph, and seconds of these."""
    gm = graphs.fresh()
    gc.collect()
    with fake_world(0, RANKS), closing_of(gm) as spent:
        begin = time.process_time()
        run(gm, graphs.entries)
        seconds = time.process_time() - begin
    return seconds - sum(spent), sum(spent)


@contextmanager
def closing_of(gm: fx.GraphModule) -> Iterator[list[float]]:
    """Seconds that each recompile and lint of all of ``gm`` takes; not of the small graphs that torch's pass traces."""
    spent: list[float] = []

    def clocked(work: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            begin = time.process_time()
            try:
                return work(self, *args)
            finally:
                if is_ours(self):
                    spent.append(time.process_time() - begin)

        return run

    recompile = clocked(fx.GraphModule.recompile, lambda one: one is gm)
    lint = clocked(fx.Graph.lint, lambda one: one is gm.graph)
    with mock.patch.object(fx.GraphModule, "recompile", recompile), mock.patch.object(fx.Graph, "lint", lint):
        yield spent


def memory(graphs: Graphs) -> float:
    """Peak of what Python allocates inside the pass, over that of copying the graph."""

    def peak(work: Callable[[], object]) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            kept = work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            del kept

    gm = graphs.fresh()
    with fake_world(0, RANKS), mock.patch.object(fx.GraphModule, "recompile"):
        inside = peak(lambda: manual_overlap_bucketing(gm, graphs.entries))
    return inside / peak(lambda: copy.deepcopy(graphs.gm.graph))


def view(graphs: Graphs) -> float:
    """Seconds of a GraphView, all modules and which nodes ran in each, over those of a walk; best of several, in turns."""
    graph = graphs.gm.graph
    with collector.paused():
        pairs = [(clock(lambda: GraphView(graph)), clock(lambda: walk(graph))) for _ in range(5)]
    trees, walks = zip(*pairs, strict=True)
    return min(trees) / min(walks)


def walk(graph: fx.Graph) -> int:
    """Visit every node, every input of it and every user of it."""
    return sum(1 for node in graph.nodes for _ in (node, *node.all_input_nodes, *node.users))


def best(work: Callable[[Graphs], float], graphs: Graphs) -> float:
    """Fewest seconds of several runs."""
    with collector.paused():
        return min(work(graphs) for _ in range(TURNS))


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """x of the line log(seconds) = x log(size) + c with the least squares."""
    return linear_regression([math.log(size) for size in sizes], [math.log(s) for s in seconds]).slope


def clock(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def reading(graphs: Graphs) -> float:
    """What all checks share: following every byte through the graph that came out."""
    step = graphs.step
    return clock(lambda: read_graph(graphs.passed.bucketed.graph, step.inputs["joint"], step.outputs["joint"]))


def auditing(graphs: Graphs) -> float:
    """The promise of the plan, held against both readings."""
    world, before, after = graphs.world, graphs.world.reading(0)["joint"], graphs.passed.reading
    members = world.members

    def work() -> None:
        promise = promise_of(graphs.plan, graphs.step.parameters, world.resolution, members)
        problems = audit(promise, before, after)
        assert not problems, problems[:3]

    return clock(work)


def collectives(graphs: Graphs) -> float:
    """Could it hang: launches and waits of one rank."""
    groups = graphs.world.members
    return clock(lambda: calls_of(graphs.passed.bucketed.graph, graphs.passed.reading, groups))


def golden(graphs: Graphs) -> float:
    """The text of the schedule."""
    world, passed = graphs.world, graphs.passed

    def work() -> str:
        schedule = schedule_of(passed.reading, world.entry_of, world.dims_of(passed.bucketed.graph))
        return golden_text("decoder.toml", graphs.step.mesh, {"joint": schedule})

    return clock(work)


def same(graphs: Graphs) -> float:
    """Every output, held against the expression that it stood for: both graphs, one rank."""
    step, bucketed, members = graphs.step, graphs.passed.bucketed, graphs.world.members
    inputs, outputs = step.inputs["joint"], step.outputs["joint"]
    before = GraphSide(graphs.gm.graph, graphs.gm, inputs, outputs, members)
    after = GraphSide(bucketed.graph, bucketed.root, inputs, outputs, members)

    def work() -> None:
        found = compared(ExpressionTable(), before, after, {})
        assert not found.differences, found.differences[:3]
        assert found.outputs == len(outputs)

    return clock(work)


ROWS: dict[str, Callable[[Graphs], float]] = {
    "the pass": lambda graphs: timed(graphs, manual_overlap_bucketing)[0],
    "reading": reading,
    "audit": auditing,
    "collectives": collectives,
    "golden": golden,
    "same": same,
}


if __name__ == "__main__":
    main()
