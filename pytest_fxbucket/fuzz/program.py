"""Graphs of collectives of every kind, written node by node for any number of ranks; their process groups, and roles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import floordiv, getitem, mul
from typing import Any, cast

import torch
from torch import fx

from pytest_fxbucket.compat.c10d import c10d_functional, fake_world, named_groups
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.pytree import tree_map
from pytest_fxbucket.same.two_graphs import ends
from pytest_fxbucket.step.roles import Parameter, Role, StepGraph, Value

aten, c10d = torch.ops.aten, c10d_functional()
COLUMNS = 3


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph again, with the same fake values: for a pass to change."""
    return fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))


class Program:
    """A graph under construction. Each node carries its fake value and the module that it was made for."""

    def __init__(self, world: int, groups: Groups | None = None) -> None:
        self.world, self.groups = world, dict(groups or {})
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.backward = False
        """Whether nodes made now belong to the backward."""
        self.module: str | None = "a"
        """Module of nodes made now; None: nobody says."""

    def ranks(self, group: str) -> int:
        """How many ranks a group has."""
        return len(self.groups[group][0]) if group in self.groups else self.world

    def given(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, role: str = "") -> fx.Node:
        """An input of this shape; ``role`` is what :func:`with_role` gives it."""
        with self.mode:
            node = self.shown(name, torch.empty(shape, dtype=dtype))
        return with_role(node, role) if role else node

    def shown(self, name: str, value: torch.Tensor) -> fx.Node:
        """An input with the fake value ``value``."""
        # Inputs may be asked for at any time, and stay together at the head of the graph.
        last = self.graph.find_nodes(op="placeholder")[-1:]
        with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def dynamic(self, name: str, *shape: int) -> fx.Node:
        """An input whose number of rows is symbolic, traced with ``shape``; inputs traced with equal rows share one size."""
        from pytest_fxbucket.compat.fake_tensors import symbolic_rows

        return self.shown(name, symbolic_rows(self.mode, torch.empty(shape)))

    def rows(self, node: fx.Node, by: Callable[[Any, Any], Any], number: int) -> Any:
        """``by(rows, number)`` of the rows of ``node``, such as a product; if the size is symbolic, a node that computes it."""
        size = node.meta["val"].shape[0]
        if isinstance(size, int):
            return by(size, number)
        return self.call(by, self.call(aten.sym_size.int, node, 0), number)

    def shards(self, names: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[fx.Node]:
        """An input for each letter of ``names``, of shape (2, 3) unless said."""
        return [self.given(name, *(shape or (2, COLUMNS)), dtype=dtype) for name in names]

    def fulls(self, names: str, group: str = "0", dtype: torch.dtype = torch.float32) -> list[fx.Node]:
        """An input for each letter of ``names`` that a reduce-scatter on ``group`` makes (2, 3) of."""
        return [self.given(name, 2 * self.ranks(group), COLUMNS, dtype=dtype) for name in names]

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Call ``target``; the fake value is computed from those of the arguments."""
        node = self.graph.call_function(target, args, kwargs)
        values, keywords = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*values, **keywords)
        # Metadata as tracers write it, by which passes tell the module and the direction of a node.
        key = "fwd_nn_module_stack" if self.backward else "nn_module_stack"
        if self.module is not None:
            node.meta[key] = {"": ("", torch.nn.Module), self.module: (self.module, torch.nn.Module)}
        if self.backward:
            node.meta["autograd_backward"] = True
        return node

    def neg(self, node: fx.Node) -> fx.Node:
        """Compute that no pass looks through."""
        return self.call(aten.neg.default, node)

    def add(self, a: fx.Node, b: fx.Node | float) -> fx.Node:
        """Add what both hold, or a number."""
        return self.call(aten.add.Tensor, a, b)

    def launch_gather(self, node: fx.Node, group: str = "0") -> fx.Node:
        """All-gather ``node``; gives the launch."""
        return self.call(c10d.all_gather_into_tensor.default, node, self.ranks(group), group)

    def launch_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """Reduce-scatter ``node``; gives the launch."""
        return self.call(c10d.reduce_scatter_tensor.default, node, op, self.ranks(group), group)

    def launch_all_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """All-reduce ``node``; gives the launch."""
        return self.call(c10d.all_reduce.default, node, op, group)

    def launch_gather_into(self, node: fx.Node, buffer: fx.Node, group: str = "0") -> fx.Node:
        """All-gather ``node`` into ``buffer``; gives the launch."""
        return self.call(c10d.all_gather_into_tensor_out.default, node, self.ranks(group), group, out=buffer)

    def launch_all_reduce_in_place(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """All-reduce ``node`` where it lies; gives the launch."""
        return self.call(c10d.all_reduce_.default, node, op, group)

    def launch_all_to_all(self, node: fx.Node, group: str = "0") -> fx.Node:
        """Send every rank its part of the rows of ``node``; gives the launch."""
        ranks = self.ranks(group)
        rows = [self.rows(node, floordiv, ranks)] * ranks
        return self.call(c10d.all_to_all_single.default, node, rows, rows, group)

    def launch_broadcast(self, node: fx.Node, group: str = "0") -> fx.Node:
        """Give every rank what the last of the group has in ``node``; gives the launch."""
        return self.call(c10d.broadcast.default, node, self.ranks(group) - 1, group)

    def wait(self, launch: fx.Node) -> fx.Node:
        """Wait for ``launch``."""
        return self.call(c10d.wait_tensor.default, launch)

    def gather(self, node: fx.Node, group: str = "0") -> fx.Node:
        """All-gather ``node`` and wait for it; gives the wait, as the methods below do."""
        return self.wait(self.launch_gather(node, group))

    def reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """As :meth:`gather`, of a reduce-scatter."""
        return self.wait(self.launch_reduce(node, op, group))

    def all_reduce(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """As :meth:`gather`, of an all-reduce."""
        return self.wait(self.launch_all_reduce(node, op, group))

    def together(self, form: str, nodes: Sequence[fx.Node], *said: str) -> list[fx.Node]:
        """A launch of :meth:`gather`, :meth:`reduce` or :meth:`all_reduce`, by name, for each of ``nodes``, then the waits."""
        return [self.wait(launch) for launch in [getattr(self, f"launch_{form}")(node, *said) for node in nodes]]

    def buffer_for(self, node: fx.Node, group: str = "0") -> fx.Node:
        """Room for what ``node`` is gathered to."""
        value = node.meta["val"]
        shape = [self.rows(node, mul, self.ranks(group)), *value.shape[1:]]
        return self.call(aten.empty.memory_format, shape, dtype=value.dtype, device=torch.device("cpu"))

    def gather_into(self, node: fx.Node, buffer: fx.Node, group: str = "0") -> fx.Node:
        """All-gather ``node`` into ``buffer``; gives the wait."""
        return self.wait(self.launch_gather_into(node, buffer, group))

    def all_reduce_in_place(self, node: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
        """All-reduce ``node`` where it lies; gives the wait."""
        return self.wait(self.launch_all_reduce_in_place(node, op, group))

    def coalesced(self, kind: str, nodes: Sequence[fx.Node], op: str = "sum", group: str = "0") -> list[fx.Node]:
        """One launch of several tensors; gives a wait for each."""
        ranks = [self.ranks(group)]
        forms: dict[str, tuple[Any, list[Any]]] = {
            "all_gather": (c10d.all_gather_into_tensor_coalesced, ranks),
            "reduce_scatter": (c10d.reduce_scatter_tensor_coalesced, [op, *ranks]),
            "all_reduce": (c10d.all_reduce_coalesced, [op]),
        }
        target, said = forms[kind]
        launch = self.call(target.default, list(nodes), *said, group)
        return [self.wait(self.part(launch, i)) for i in range(len(nodes))]

    def part(self, node: fx.Node, index: int) -> fx.Node:
        """One tensor of a launch of several."""
        return self.call(getitem, node, index)

    def returns(self, *nodes: fx.Node, roles: Sequence[str] = ()) -> fx.GraphModule:
        """The graph that returns ``nodes``, which have these ``roles``; nothing can be added to it any more."""
        with_roles(self.graph.output(list(nodes)), roles)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


# Process groups by the names that drawn graphs use.


Groups = Mapping[str, Sequence[Sequence[int]]]
"""Process groups by the name that graphs use: lists of ranks, all of one length, and each rank is in one list of each name."""
HALVES: dict[int, Groups] = {
    2: {"halves": [[0], [1]], "strided": [[0], [1]]},
    4: {"halves": [[0, 1], [2, 3]], "strided": [[0, 2], [1, 3]]},
}
"""Groups of half the ranks: neighbours, and every other one, so that a rank's index in its group is not its number."""


@contextmanager
def fake_groups(world: int, groups: Groups | None = None, rank: int = 0) -> Iterator[None]:
    """This process as ``rank`` of fake ranks whose process groups have the names that graphs use, as a pass finds them."""
    with ExitStack() as inside:
        inside.enter_context(fake_world(rank, world))
        inside.enter_context(named_groups(groups or {}, rank))
        yield


def members_of(world: int, groups: Groups, rank: int) -> dict[str, tuple[int, ...]]:
    """Ranks of each group that ``rank`` is in, by name, with ``"0"``, all of ``world``."""
    lists: Groups = {"0": [list(range(world))], **groups}
    return {name: next(tuple(ranks) for ranks in parts if rank in ranks) for name, parts in lists.items()}


# Roles of what a program is given and returns, as a training step has them: ``param a.w``, ``state a.w.momentum``. A program
# without them is a graph of which nothing is known but its values.


_KEY = "fuzz_role"  # in node.meta, so that copies of a graph keep roles
MODULES = ("a", "b", "c")
"""Modules that a drawn program launches collectives for."""


def with_role(node: fx.Node, role: str) -> fx.Node:
    """Give the input ``node`` this role; gives ``node``."""
    node.meta[_KEY] = role
    return node


def with_roles(output: fx.Node, roles: Sequence[str]) -> None:
    """Give the values that ``output`` returns these roles, in order; with no roles, nothing is said of any."""
    if roles:
        output.meta[_KEY] = list(roles)


def role_of(node: fx.Node) -> str:
    """Role of an input; empty if it was given none."""
    return str(node.meta.get(_KEY, ""))


def roles_of(output: fx.Node) -> list[str]:
    """Roles of the returned values, in order; none if they were given none."""
    return list(output.meta.get(_KEY, ()))


def step_of(graph_module: fx.GraphModule) -> StepGraph:
    """``graph_module`` as a step, with roles if it has them."""
    graph = graph_module.graph
    inputs, outputs = ends(graph)
    roles = roles_of(graph.output_node())
    if roles:
        given = graph.find_nodes(op="placeholder")
        inputs = [_as(value, role_of(node) or f"batch {node.name}") for value, node in zip(inputs, given, strict=True)]
        outputs = [_as(value, role) for value, role in zip(outputs, roles, strict=True)]
    parameters = tuple(_parameter(value) for value in inputs if value.role == "param")
    ways = {"joint": graph_module}, {"joint": tuple(inputs)}, {"joint": tuple(outputs)}
    return StepGraph(*ways, parameters, ("", *MODULES), (), 0)


def _as(value: Value, said: str) -> Value:
    role, _, fqn = said.partition(" ")
    return replace(value, role=cast("Role", role), fqn=fqn)


def _parameter(value: Value) -> Parameter:
    dtype: Any = value.dtype
    return Parameter(value.fqn, (), value.shape, value.shape, dtype, trainable=True)
