"""Graphs of collectives of every kind, written by hand for any number of ranks; and our pass on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import Roofline
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.keep_order import forget_order
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_module, by_size
from suites.passes.all_ranks import compare
from suites.passes.on_ranks import copied, fake_groups
from suites.passes.rank_jobs_of_passes import Groups

CLUSTER = Cluster(
    name="handmade",
    flops={"float32": 1e12},
    memory_bandwidth=1e12,
    memory=1e9,
    devices_per_node=8,
    within=Link(1e11, 1e-6),
    between=Link(1e10, 1e-5),
)
aten, c10d = torch.ops.aten, c10d_functional()
COLUMNS = 3
SGD = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "lr": 1.0,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": True,
}
"""Arguments of aten._fused_sgd_ for a plain step of size 1."""


class Program:
    """A graph under construction. Each node carries its fake value and the module that it was made for."""

    def __init__(self, world: int, groups: Groups | None = None) -> None:
        self.world, self.groups = world, dict(groups or {})
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.backward = False
        """Whether nodes made now belong to the backward."""
        self.module = "a"
        """Module of nodes made now."""

    def ranks(self, group: str) -> int:
        """How many ranks a group has."""
        return len(self.groups[group][0]) if group in self.groups else self.world

    def given(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        with self.mode:
            return self.shown(name, torch.empty(shape, dtype=dtype))

    def shown(self, name: str, value: torch.Tensor) -> fx.Node:
        """An input with the fake value ``value``."""
        last = self.graph.find_nodes(op="placeholder")[-1:]
        with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def shards(self, names: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[fx.Node]:
        """An input for each letter of ``names``, of shape (2, 3) unless said."""
        return [self.given(name, *(shape or (2, COLUMNS)), dtype=dtype) for name in names]

    def fulls(self, names: str, group: str = "0", dtype: torch.dtype = torch.float32) -> list[fx.Node]:
        """An input for each letter of ``names`` that a reduce-scatter on ``group`` makes (2, 3) of."""
        return [self.given(name, 2 * self.ranks(group), COLUMNS, dtype=dtype) for name in names]

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, keywords = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*values, **keywords)
        key = "fwd_nn_module_stack" if self.backward else "nn_module_stack"
        node.meta[key] = {"": ("", torch.nn.Module), self.module: (self.module, torch.nn.Module)}
        if self.backward:
            node.meta["autograd_backward"] = True
        return node

    def neg(self, node: fx.Node) -> fx.Node:
        """Compute that no pass looks through."""
        return self.call(aten.neg.default, node)

    def add(self, a: fx.Node, b: fx.Node | float) -> fx.Node:
        return self.call(aten.add.Tensor, a, b)

    def launch_gather(self, node: fx.Node, group: str = "0") -> fx.Node:
        return self.call(c10d.all_gather_into_tensor.default, node, self.ranks(group), group)

    def launch_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        return self.call(c10d.reduce_scatter_tensor.default, node, op, self.ranks(group), group)

    def launch_all_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        return self.call(c10d.all_reduce.default, node, op, group)

    def wait(self, launch: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, launch)

    def gather(self, node: fx.Node, group: str = "0") -> fx.Node:
        """Launch and wait, as of all that follow; gives the wait."""
        return self.wait(self.launch_gather(node, group))

    def reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        return self.wait(self.launch_reduce(node, op, group))

    def all_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        return self.wait(self.launch_all_reduce(node, op, group))

    def together(self, form: str, nodes: Sequence[fx.Node], *said: str) -> list[fx.Node]:
        """A launch of :meth:`gather`, :meth:`reduce` or :meth:`all_reduce`, by name, for each of ``nodes``, then the waits."""
        return [self.wait(launch) for launch in [getattr(self, f"launch_{form}")(node, *said) for node in nodes]]

    def buffer_for(self, node: fx.Node, group: str = "0") -> fx.Node:
        """Room for what ``node`` is gathered to."""
        value = node.meta["val"]
        shape = [value.shape[0] * self.ranks(group), *value.shape[1:]]
        return self.call(aten.empty.memory_format, shape, dtype=value.dtype, device=torch.device("cpu"))

    def gather_into(self, node: fx.Node, buffer: fx.Node, group: str = "0") -> fx.Node:
        return self.wait(self.call(c10d.all_gather_into_tensor_out.default, node, self.ranks(group), group, out=buffer))

    def all_reduce_in_place(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        return self.wait(self.call(c10d.all_reduce_.default, node, op, group))

    def coalesced(self, kind: str, nodes: Sequence[fx.Node], op: str = "sum", group: str = "0") -> list[fx.Node]:
        """One launch of several tensors; gives a wait for each."""
        ranks = [self.ranks(group)]
        target, said = {
            "all_gather": (c10d.all_gather_into_tensor_coalesced, ranks),
            "reduce_scatter": (c10d.reduce_scatter_tensor_coalesced, [op, *ranks]),
            "all_reduce": (c10d.all_reduce_coalesced, [op]),
        }[kind]
        launch = self.call(target.default, list(nodes), *said, group)
        return [self.wait(self.part(launch, i)) for i in range(len(nodes))]

    def part(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(getitem, node, index)

    def returns(self, *nodes: fx.Node) -> fx.GraphModule:
        self.graph.output(list(nodes))
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


@dataclass(frozen=True)
class Passed:
    """A graph before and after our pass."""

    before: fx.GraphModule
    after: fx.GraphModule
    report: PassReport

    @property
    def launches(self) -> list[str]:
        """Operators of the launches after the pass, in order."""
        return launches(self.after.graph)

    @property
    def reasons(self) -> list[str]:
        """Why launches were left alone, each reason once."""
        return sorted({left.reason for left in self.report.left_alone})


Entry = str | Sequence[str]


def through(program: Program, graph_module: fx.GraphModule, entries: Sequence[Entry] = ("a",), **options: Any) -> Passed:
    """``graph_module`` through our pass, with its groups in place; ``entries`` as the drop-in function takes them.

    ``options`` are ManualPass's; with ``by="size"`` there are no entries.
    """
    after = copied(graph_module)
    with fake_groups(program.world, program.groups):
        report = run_pass(after.graph, entries, **options)
    after.recompile()
    return Passed(graph_module, after, report)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 0, "defer_reduce": False},
    {"prefetch": 2, "layout": "execution", "dtypes": "mixed"},
)
"""Each graph goes through the pass with each of these."""


def equal(
    program: Program, nodes: Sequence[fx.Node], entries: Sequence[Entry] = ("a",), settings: Sequence[dict[str, Any]] = SETTINGS
) -> Passed:
    """The graph that returns ``nodes``, through the pass with each of ``settings``, and on all ranks the same each time.

    Gives the first of them.
    """
    graph_module = program.returns(*nodes)
    passed = [through(program, graph_module, entries, **options) for options in settings]
    for options, one in zip(settings, passed, strict=True):
        assert compare(graph_module, one.after, program.world, program.groups) == [], options
    return passed[0]


def chain(modules: Sequence[str] = ("a", "b", "c"), *, backward: bool = False) -> fx.GraphModule:
    """Two shards in each of ``modules`` on 4 ranks, gathered one after the other, read, and reduced again if ``backward``."""
    made = Program(4)
    names = [[f"{module}_{name}".replace(".", "_") for name in ("weight", "scale")] for module in modules]
    shards = [[made.given(name, 2, COLUMNS) for name in pair] for pair in names]
    x, reduced = made.given("x", 8, COLUMNS), []
    for made.module, pair in zip(modules, shards, strict=True):
        for shard in pair:
            x = made.call(aten.mul.Tensor, x, made.gather(shard))
    for made.module in reversed(modules) if backward else ():
        for _ in range(2):
            x = made.neg(x)
            reduced.append(made.reduce(x, "avg"))
    return made.returns(x, *reduced)


def launches(graph: fx.Graph) -> list[str]:
    """Operators of the launches of ``graph``, in order."""
    found = [collectives.read_launch(node) for node in graph.nodes]
    return [one.operator for one in found if one is not None]


def run_pass(graph: fx.Graph, entries: Sequence[Entry], **options: Any) -> PassReport:
    """Our pass on ``graph`` in place."""
    forget_order(graph)
    plans = [("+".join([e] if isinstance(e, str) else e), [e] if isinstance(e, str) else list(e)) for e in entries]
    targets = by_size(graph) if options.get("by") in ("size", "overlap") else by_module(graph, plans, None)
    cost = options.pop("cost", Roofline(CLUSTER, lambda _, count: range(count)))
    return ManualPass.of(**options).run(graph, targets, Estimates(cost, CLUSTER))
