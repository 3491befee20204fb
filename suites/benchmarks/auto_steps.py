"""Steps of large models for automatic schedulers: unbucketed, on fake tensors, whole, and forward and backward apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fixtures.models.moe import Moe, MoeShape
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.cost.costs import CostModel, is_free
from pytest_fxbucket.graph.collectives import is_wait, read_launch
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.process import collector
from pytest_fxbucket.step.mesh import Mesh, fake_mesh
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.step.roles import Phase, StepGraph, Value
from suites.benchmarks.lower_bound import COMPUTE, Order, Task
from suites.plans.llama import MIXED, llama

_LLAMA = partial(
    llama,
    "layers = LAYERS, dim = 4096, heads = 32, kv_heads = 8, vocab = 128256",
    batch="fixtures.models.llama:batch_of_a_gpu",
    **MIXED,
)
_TP_PLAN = """
[parallel.tp_plan]
"layers.*.attention.wq" = "colwise"
"layers.*.attention.wk" = "colwise"
"layers.*.attention.wv" = "colwise"
"layers.*.attention.wo" = "rowwise"
"layers.*.feed_forward.w1" = "colwise"
"layers.*.feed_forward.w3" = "colwise"
"layers.*.feed_forward.w2" = "rowwise"
"""
_MOE = """
[model]
factory = "suites.benchmarks.auto_steps:moe"
args = { layers = LAYERS }
batch = "suites.benchmarks.auto_steps:tokens"
loss = "fixtures.models.moe:loss"

[bucket]
plan = ["embed", "layers.*", "norm+output"]

[parallel]
param_dtype = "bfloat16"
reduce_dtype = "float32"
dp_shard = 64
ep = 16
ep_plan = ["layers.*.experts"]
"""
PLANS = {
    "2-D Llama": _LLAMA(16, tp=4) + _TP_PLAN,
    "MoE": _MOE,
    "hybrid shard": _LLAMA(8, mode="hybrid_shard", dp_replicate=8),
}
"""On 64 ranks each: shapes of Llama 8B, 8,192 tokens a rank; 64 experts, of whom a token has two, and 4,096 tokens."""
MOE = MoeShape(dim=4096, hidden=1024, experts=64, capacity=160, vocab=32000)


def moe(layers: int) -> Moe:
    """Without memory: its experts are drawn before a module has them, so capture would have all of them at once."""
    with torch.device("meta"):
        return Moe(replace(MOE, layers=layers))


def tokens(rank: int, step: int) -> tuple[Tensor]:
    return (torch.zeros(2, 2048, dtype=torch.int64),)


def captured(name: str, layers: int) -> tuple[Mesh, StepGraph]:
    """The unbucketed step of ``PLANS[name]``."""
    (plan,) = parse_plans(PLANS[name].replace("LAYERS", str(layers)), Path(__file__).parents[2] / "auto.toml")
    mesh = mesh_of(plan)
    with collector.paused():
        step = capture_plan(plan, mesh, 0)
    with fake_mesh(mesh, 0):
        return mesh, with_own_values(step)


def with_own_values(step: StepGraph) -> StepGraph:
    """``step`` with the fake values that its own nodes give.

    A parameter that is gathered again for backward is a copied node, and has the values of the first gather: by those, both
    share memory, which torch's liveness believes.
    """
    joint = own_copy(step.graphs["joint"])
    mode = next(node.meta["val"].fake_mode for node in joint.graph.nodes if isinstance(node.meta.get("val"), FakeTensor))

    def value(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    with mode:
        for node in joint.graph.nodes:
            if node.op == "call_function":
                args, kwargs = pytree.tree_map(value, (node.args, dict(node.kwargs)))
                node.meta["val"] = node.target(*args, **kwargs)
    return replace(step, graphs={"joint": joint})


def parts_of(step: StepGraph) -> Mapping[Phase, StepGraph]:
    """The step whole, and its forward and its backward as graphs of their own, as compilers have them."""
    joint = step.graphs["joint"]
    late = set(_late(joint.graph))
    returned: Sequence[fx.Node] = joint.graph.output_node().args[0]  # type: ignore[assignment]  # an output's argument is any
    crossing = list(dict.fromkeys(source for node in late for source in inputs_of(node) if source not in late))
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    crossing = sorted((node for node in crossing if node.op == "call_function"), key=order.__getitem__)
    given = dict(zip(joint.graph.find_nodes(op="placeholder"), step.inputs["joint"], strict=True))
    taken = dict(zip(crossing, map(_crossing, crossing), strict=True))
    gives = list(zip(returned, step.outputs["joint"], strict=True))
    early_outputs = [pair for pair in gives if pair[0] not in late] + list(taken.items())
    late_outputs = [pair for pair in gives if pair[0] in late]
    return {
        "joint": step,
        "forward": _part(step, "forward", given, lambda node: node not in late, early_outputs),
        "backward": _part(step, "backward", given | taken, late.__contains__, late_outputs),
    }


def _late(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes of backward, and what reads them; parts of a list are where the list is, since no list crosses."""
    late = set[fx.Node]()
    for node in graph.nodes:
        sources = inputs_of(node)
        whole = all(isinstance(source.meta.get("val"), Tensor) for source in sources)
        own = node.op == "call_function" and direction_of(node) == "backward" and (whole or not sources)
        if node.op != "output" and (own or any(source in late for source in sources)):
            late.add(node)
            yield node


def _crossing(node: fx.Node) -> Value:
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} crosses from forward to backward and is no tensor"
    return Value("crossing", node.name, tuple(value.shape), value.dtype)


def _part(
    step: StepGraph,
    phase: Phase,
    given: Mapping[fx.Node, Value],
    has: Callable[[fx.Node], bool],
    gives: Sequence[tuple[fx.Node, Value]],
) -> StepGraph:
    joint = step.graphs["joint"]
    inside = [node for node in joint.graph.nodes if node.op == "call_function" and has(node)]
    read = {source for node in inside for source in inputs_of(node)} | {node for node, _ in gives}
    inputs = {node: value for node, value in given.items() if node in read and node not in inside}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    constants = [node for node in joint.graph.nodes if node.op == "get_attr" and node in read]
    for node in (*constants, *inside):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node, _ in gives])
    module = fx.GraphModule(joint, graph)
    values = {phase: tuple(inputs.values())}, {phase: tuple(value for _, value in gives)}
    return replace(step, graphs={phase: module}, inputs=values[0], outputs=values[1])


def tasks_of(step: StepGraph, phase: Phase, cost: CostModel) -> list[Task]:
    """What a graph runs, for the lower bound.

    Compute keeps its order. What casts or moves what it made may go before its place, as when a launch is moved up; what casts
    a parameter goes with its launch, and what ends a gradient that is reduced goes with its wait, both anywhere.
    """
    graph = step.graphs[phase].graph
    tasks, made = list[Task](), dict[fx.Node, tuple[int, ...]]()
    computed, brought = set[fx.Node](), set[fx.Node]()
    ends = _ends_of_gradients(graph, step.outputs[phase])
    for node in graph.nodes:
        sources, launch = inputs_of(node), read_launch(node)
        if node in ends and (is_wait(node) or any(source in brought for source in sources)):
            brought.add(node)
        elif launch is None and (computes(node) or any(source in computed for source in sources)):
            computed.add(node)
        needs = tuple(dict.fromkeys(number for source in sources for number in made[source]))
        if is_free(node):
            made[node] = needs if node.op != "output" else ()
            continue
        made[node] = (len(tasks),)
        order: Order = "free" if node not in computed else "kept" if computes(node) else "earlier"
        tasks.append(Task(cost(node), needs, COMPUTE if launch is None else launch.group, order))
    return tasks


def _ends_of_gradients(graph: fx.Graph, outputs: Sequence[Value]) -> set[fx.Node]:
    """What nothing reads but outputs that are gradients, and other ends."""
    output = graph.output_node()
    returned: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]  # an output's argument is any
    others = {node for node, value in zip(returned, outputs, strict=True) if value.role != "grad"}
    ends = set[fx.Node]()
    for node in reversed(graph.nodes):
        read_by = all(user is output or user in ends for user in node.users)
        if node.users and read_by and node not in others and read_launch(node) is None:
            ends.add(node)
    return ends
