"""Graphs of collectives of every kind, written node by node for any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import floordiv, getitem, mul
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.pytree import tree_map
from pytest_fxbucket.fuzz.groups import Groups
from pytest_fxbucket.fuzz.roles import with_role, with_roles

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
        """An input of this shape; ``role`` is as :mod:`pytest_fxbucket.fuzz.roles` reads it."""
        with self.mode:
            node = self.shown(name, torch.empty(shape, dtype=dtype))
        return with_role(node, role) if role else node

    def shown(self, name: str, value: torch.Tensor) -> fx.Node:
        """An input with the fake value ``value``."""
        last = self.graph.find_nodes(op="placeholder")[-1:]
        with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def dynamic(self, name: str, *shape: int) -> fx.Node:
        """An input whose rows are a symbolic size, ``shape`` at the one that it is traced with; of equal rows one size."""
        from pytest_fxbucket.compat.fake_tensors import symbolic_rows

        return self.shown(name, symbolic_rows(self.mode, torch.empty(shape)))

    def rows(self, node: fx.Node, by: Callable[[Any, Any], Any], number: int) -> Any:
        """Rows of ``node``, times ``number`` or divided by it; of a symbolic size a node that computes it."""
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
        """Call ``target``; its fake value is what it gives for those of its arguments."""
        node = self.graph.call_function(target, args, kwargs)
        values, keywords = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*values, **keywords)
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
        """Launch and wait, as of all that follow; gives the wait."""
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
