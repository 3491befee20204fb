"""Prints what simulating a step costs: nodes, and seconds of time and memory together, of generated steps of several sizes.

Layers of nine parameters, each gathered and reduced by itself, with as many kernels and views between as a decoder has.
Seconds of this process on a core, the first time, and the best of several. Then what ``fxbucket simulate`` costs behind the
capture of a plan of 126 Llama layers of a 405B shape with its optimizer, on 4,096 ranks. ``make bench``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.process import collector
from pytest_fxbucket.simulate.of_plan import simulated_ranks, unbucketed
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.step.mesh import fake_mesh, shard_mesh
from pytest_fxbucket.step.roles import MeshDim, StepGraph
from suites.benchmarks.passes import clock, slope
from suites.graph.handmade import Handmade, aten
from suites.plans.llama import MIXED, llama

SIZES = (12_500, 25_000, 50_000, 100_000)
RANKS, ROWS, DIM, WEIGHTS = 8, 16, 64, 9
TURNS = 3
AIM_S, AIM_OF_A_PLAN_S = 3, 10
"""Of the largest step, and of the plan."""
ARGS = "layers = 126, dim = 16384, heads = 128, kv_heads = 8, vocab = 128256"
HYBRID = {"mode": "hybrid_shard", "dp_replicate": 8, **MIXED}
PLAN = (
    llama(ARGS, 512, batch="suites.benchmarks.capture:batch", **HYBRID)
    + """
[[optimizer]]
factory = "torch.optim:AdamW"
args = { lr = 3e-4, fused = true }
"""
)
CLUSTER = Cluster(
    name="generated",
    flops={"float32": 67e12},
    memory_bandwidth=3.35e12,
    memory=80e9,
    devices_per_node=8,
    within=Link(450e9, 1e-6),
    between=Link(50e9, 5e-6),
    launch=5e-6,
    rounding=512,
)


def main() -> None:
    """Print one row a size."""
    print(f"{'nodes':>8} {'collectives':>12} {'first':>8} {'best':>8}   the largest to stay under {AIM_S} s")
    sizes, seconds = list[int](), list[float]()
    for nodes in SIZES:
        step = generated(nodes)
        count = len(step.graphs["joint"].graph.nodes)
        with fake_mesh(shard_mesh(RANKS), 0), collector.paused():
            flights = 0

            def work(step: StepGraph = step) -> None:
                nonlocal flights
                flights = len(simulate(step, CLUSTER).flights)

            first = clock(work)
            best = min(clock(work) for _ in range(TURNS))
        sizes.append(count)
        seconds.append(best)
        print(f"{count:8,} {flights:12,} {first:8.2f} {best:8.2f}", flush=True)
    print(f"x of nodes^x: {slope(sizes, seconds):.2f}")
    of_a_plan()


def of_a_plan() -> None:
    """Print what comes behind the capture of the plan, part by part, as the command does it."""
    (plan,) = parse_plans(PLAN, Path(__file__).parents[2] / "p.toml")
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
    captured = clock(lambda: world.step(0))
    parts = {
        "pass and reading": clock(lambda: world.versions(0)),
        "bucketed": clock(lambda: simulated_ranks(world, CLUSTER, believed=True)),
        "unbucketed": clock(lambda: unbucketed(world, 0, CLUSTER)),
    }
    nodes = len(world.step(0).graphs["joint"].graph.nodes)
    told = ", ".join(f"{name} {took:.2f} s" for name, took in parts.items())
    print(f"126 layers on {plan.world_size:,} ranks, {nodes:,} nodes, captured in {captured:.1f} s, then {told}: ", end="")
    print(f"{sum(parts.values()):.1f} s, to stay under {AIM_OF_A_PLAN_S} s")


def generated(nodes: int) -> StepGraph:
    """A step of some ``nodes`` nodes: layers forward, and back."""
    made = Handmade(RANKS)
    layers = max(1, nodes // _nodes_of_a_layer())
    weights = [[made.param(f"layers.{n}.w{i}.weight", DIM // RANKS, DIM) for i in range(WEIGHTS)] for n in range(layers)]
    x = made.batch(ROWS, DIM)
    kept = []
    for each in weights:
        kept.append(x)
        for weight in each:
            x = _forward(made, x, weight)
    loss = made.call(aten.sum.default, x)
    made.returns(loss, "loss")
    gradient = made.call(aten.expand.default, loss, [ROWS, DIM])
    for number, (each, given) in reversed(list(enumerate(zip(weights, kept, strict=True)))):
        for place, weight in reversed(list(enumerate(each))):
            gradient, of_weight = _backward(made, gradient, given, weight)
            made.returns(of_weight, "grad", f"layers.{number}.w{place}.weight")
    inputs, outputs = {"joint": tuple(made.inputs)}, {"joint": tuple(made.outputs)}
    graphs = {"joint": fx.GraphModule(torch.nn.Module(), made.finish())}
    return StepGraph(graphs, inputs, outputs, (), (), (MeshDim("dp_shard", RANKS),), 0)


def _forward(made: Handmade, x: fx.Node, weight: fx.Node) -> fx.Node:
    whole = made.call(aten.t.default, made.gathered(weight))
    rows = made.call(aten.view.default, x, [ROWS, DIM])
    squares = made.call(aten.mean.dim, made.call(aten.pow.Tensor_Scalar, rows, 2), [-1], True)
    normed = made.call(aten.mul.Tensor, rows, made.call(aten.rsqrt.default, squares))
    y = made.call(aten.silu.default, made.call(aten.mm.default, normed, whole))
    return made.call(aten.add.Tensor, made.call(aten.view.default, y, [ROWS, DIM]), x)


def _backward(made: Handmade, gradient: fx.Node, given: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    whole = made.gathered(weight)
    inner = made.call(aten.mul.Tensor, gradient, made.call(aten.sigmoid.default, given))
    turned = made.call(aten.t.default, inner)
    of_weight = made.reduced(made.call(aten.mm.default, turned, given))
    back = made.call(aten.mm.default, inner, whole)
    return made.call(aten.add.Tensor, made.call(aten.view.default, back, [ROWS, DIM]), gradient), of_weight


def _nodes_of_a_layer() -> int:
    """By counting: a parameter, 12 nodes forward, and 12 back, of each weight."""
    return 25 * WEIGHTS


if __name__ == "__main__":
    main()
