"""What another torch may do differently changes no golden: names, groups, files, and the order of what has none."""

from __future__ import annotations

import heapq
import pickle
import random
from collections.abc import Iterable

import pytest
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.golden.schedule import schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, read_launch
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.plans.llama import llama, plan_of
from suites.plans.traced import TRACED


class Saved:
    """The bucketed graph of a plan, to be saved, loaded, and changed as another torch might have made it."""

    def __init__(self, plan: Plan) -> None:
        world = PlanOnMesh(CapturedPlan(plan, shard_mesh(4)), "manual")
        self.step: StepGraph = world.step(0)
        self.entry_of = world.entry_of
        passed = world.passed(0)["joint"].bucketed
        self.dims = world.dims_of(passed.graph)
        self.marks = pickle.dumps([marks(node) for node in passed.graph.nodes])
        self.graph = passed.graph

    def text(self, graph: fx.Graph, dims: dict[str, str] | None = None) -> str:
        reading = read_graph(graph, self.step.inputs["joint"], self.step.outputs["joint"])
        return golden_text("x", self.step.mesh, {"joint": schedule_of(reading, self.entry_of, dims or self.dims)})

    def copy(self) -> fx.Graph:
        """The graph as it comes back from a file."""
        graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        for meta, node in zip(pickle.loads(self.marks), self.graph.nodes, strict=True):
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            nodes[node].meta = {**meta, **{key: node.meta[key] for key in ("val",) if key in node.meta}}
        return graph


def marks(node: fx.Node) -> dict[str, object]:
    """What a tracer wrote that can be saved."""
    kept = ("nn_module_stack", "fwd_nn_module_stack", "autograd_backward", "custom", "stack_trace", "seq_nr")
    return {key: node.meta[key] for key in kept if key in node.meta}


PLANS = {"llama": plan_of(llama("layers = 2, dim = 32", 4), "llama.toml"), "traced": plan_of(TRACED, "traced.toml")}


@pytest.fixture(scope="module", params=PLANS.values(), ids=PLANS.keys())
def saved(request: pytest.FixtureRequest) -> Saved:
    return Saved(request.param)


def test_names_of_nodes_and_files_are_not_in_the_text(saved: Saved) -> None:
    graph = saved.copy()
    for at, node in enumerate(graph.nodes):
        node.name = f"renamed_{at % 7}_{at}"
        node.meta["stack_trace"] = f'File "/elsewhere/{at}.py", line {at}, in other'
        node.meta["seq_nr"] = -at
    text = saved.text(graph)
    assert text == saved.text(saved.graph)
    assert not any(word in text for word in ("renamed", "elsewhere", "wait_tensor"))


def test_names_of_process_groups_are_not_in_the_text(saved: Saved) -> None:
    graph = saved.copy()
    dims = {}
    for node in graph.nodes:
        if (launch := read_launch(node)) is not None:
            dims["17:other"] = saved.dims[launch.group]
            node.args = tuple("17:other" if value == launch.group else value for value in node.args)
    assert list(dims.values()) == ["dp_shard"]
    assert saved.text(graph, dims) == saved.text(saved.graph)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_what_has_none_is_not_in_the_text(saved: Saved, seed: int) -> None:
    """Views, casts and other data movement may stand anywhere, and compute anywhere between two launches or waits."""
    graph = reordered(saved.copy(), random.Random(seed))
    assert [node.target for node in graph.nodes] != [node.target for node in saved.graph.nodes]
    assert saved.text(graph) == saved.text(saved.graph)


def test_an_order_that_has_a_meaning_is_in_the_text(saved: Saved) -> None:
    graph = saved.copy()
    first, second = [node for node in graph.nodes if launch_kind(node) is not None][-2:]
    for needed in sorted(ancestors(second) - ancestors(first), key=list(graph.nodes).index):
        first.prepend(needed)
    assert saved.text(graph) != saved.text(saved.graph)


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, queue = {node}, [node]
    for one in queue:
        fresh = [source for source in one.all_input_nodes if source not in found]
        found.update(fresh)
        queue += fresh
    return found


def reordered(graph: fx.Graph, draw: random.Random) -> fx.Graph:
    """Another order of the nodes that runs the same; launches and waits keep theirs, and compute its place among them."""
    nodes = list(graph.nodes)
    needs = {node: {nodes[at] for at in before} for node, before in zip(nodes, order_of(graph).before, strict=True)}
    last: fx.Node | None = None
    computing: list[fx.Node] = []
    for node in nodes:
        if launch_kind(node) is not None or is_wait(node) or node.op in ("placeholder", "output"):
            needs[node] |= {*computing, *([last] if last is not None else [])}
            last, computing = node, []
        elif computes(node):
            needs[node] |= {last} if last is not None else set()
            computing.append(node)
    out, moved = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in drawn_order(nodes, needs, draw):
        moved[node] = out.node_copy(node, moved.__getitem__)
    return out


def drawn_order(nodes: list[fx.Node], needs: dict[fx.Node, set[fx.Node]], draw: random.Random) -> Iterable[fx.Node]:
    needed_by: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in needs[node]:
            needed_by[source].append(node)
    left = {node: len(needs[node]) for node in nodes}
    rank = {node: (node.op == "output", draw.random(), at) for at, node in enumerate(nodes)}
    ready = [(rank[node], at) for at, node in enumerate(nodes) if not left[node]]
    place = {node: at for at, node in enumerate(nodes)}
    heapq.heapify(ready)
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        yield node
        for user in needed_by[node]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (rank[user], place[user]))
