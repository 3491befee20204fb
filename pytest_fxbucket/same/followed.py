"""What moves data, byte by byte: from launches on, and into launches and buffers."""

from __future__ import annotations

from collections.abc import Set
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from pytest_fxbucket.compat.fx_nodes import inputs_of
from pytest_fxbucket.compat.storage import storage_key
from pytest_fxbucket.graph import contents
from pytest_fxbucket.graph.effects import written
from pytest_fxbucket.graph.follow import hint
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.memory import NotFollowedError
from pytest_fxbucket.graph.movement import execute
from pytest_fxbucket.graph.ops import written_arguments
from pytest_fxbucket.same.context import Context
from pytest_fxbucket.same.exact import Exact, expression
from pytest_fxbucket.same.ops import Operator
from pytest_fxbucket.same.table import LIST, const

FOLLOWED = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Kinds of launches that are told by bytes."""


class Followed:
    """The values of a graph that are followed, as meta tensors."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.memory = Exact(context.table)
        self.values: dict[fx.Node, Any] = {}
        self.brought: set[fx.Node] = set()
        """What is told by its bytes: it came out of a launch, or lies in a buffer that data is moved into."""
        self._packed, self._buffers = _into_launches(context)
        self._known_bytes: dict[fx.Node, tuple[int, int]] = {}
        self._roots: dict[Any, list[fx.Node]] = {}
        """Of each storage the nodes from which it is followed into launches."""
        self._rooted: set[int] = set()

    def read(self, node: fx.Node) -> int:
        """What ``node`` stands for now."""
        return self.bytes(node) if node in self.brought else self.context.value(node)

    def concerns(self, node: fx.Node) -> bool:
        """Whether ``node``, which moves data, moves what is followed or what is launched."""
        if node.target is getitem:
            return node.args[0] in self.values
        return node in self._packed or not self.brought.isdisjoint(inputs_of(node))

    def begin(self, node: fx.Node) -> bool:
        """Make ``node`` a buffer, if data is moved into it, and it lies in memory as its meta tensor does."""
        if node not in self._buffers or not all(map(self._is_contiguous, inputs_of(node))):
            return False
        self.values[node] = execute(node, map_arg(node.args, self.known), dict(node.kwargs), self.memory)
        self.brought.add(node)
        return True

    def move(self, node: fx.Node, operator: Operator) -> bool:
        """Follow ``node``; whether its value is told by its bytes."""
        if operator.effects.writes and not all(target in self.brought for target in written(node)):
            return False  # memory of the model's own is written, which is told by its states
        if operator.by_memory and node.all_input_nodes[0] not in self.brought:
            return False  # what was computed lies there as its kernel left it
        try:
            args, kwargs = map_arg(node.args, self.known), map_arg(node.kwargs, self.known)
            self.values[node] = execute(node, args, kwargs, self.memory)
        except NotFollowedError:
            return False
        if not self.brought.isdisjoint(inputs_of(node)):
            self.brought.add(node)
            return True
        if not operator.view and self.context.states.changing:
            self._root(node)
        return False

    def _is_contiguous(self, node: fx.Node) -> bool:
        if node in self.brought:
            return True
        value = self.context.table.facts.get(self.context.made[node])
        return not isinstance(value, torch.Tensor) or value.is_contiguous()

    def known(self, node: fx.Node) -> Any:
        """The meta tensor of ``node``; what only was computed so far is followed from here."""
        if node not in self.values:
            self.values[node] = self._new(node, self.context.table.facts.get(self.context.made[node]))
            if self.context.states.changing:
                self._root(node)
        return self.values[node]

    def changed(self, target: fx.Node, out: int, node: fx.Node) -> None:
        """``node`` writes ``out`` where ``target`` lives, which is told by its states."""
        context, state = self.context, self.context.states.state
        for home in context.states.of(target):
            state[home] = context.number(("write", state.get(home, 0), context.made[target], out), node)
            for one in self._roots.get(home, ()):
                for tensor in tensors(self.values[one]):
                    self._hold(tensor, self.read(one))

    def bytes(self, node: fx.Node) -> int:
        """What ``node``, which is told by its bytes, stands for now."""
        value = self.values[node]
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (list, tuple)):
                return self.context.number((LIST, *(self.of_tensor(one, node) for one in value)), node)
            return self.context.number(("value", const(value)), node)
        version = self.memory.version(value)
        known = self._known_bytes.get(node)
        if known is None or known[0] != version:
            known = self._known_bytes[node] = version, self.of_tensor(value, node)
        return known[1]

    def of_tensor(self, tensor: torch.Tensor, node: fx.Node) -> int:
        """What ``tensor``, a value of ``node``, stands for now."""
        found = expression(self.context.table, tensor, self.memory)
        if isinstance(found, int):
            self.context.node_of.setdefault(found, node)
            return found
        number = self.context.number(found, node)
        self.context.learn(number, tensor)
        return number

    def _root(self, node: fx.Node) -> None:
        """Whoever writes where ``node`` lives changes what is followed from it."""
        keys = {storage_key(tensor) for tensor in tensors(self.values[node])}
        if not keys <= self._rooted:
            self._rooted |= keys
            for home in self.context.states.of(node):
                self._roots.setdefault(home, []).append(node)

    def _new(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return hint(value)
        if isinstance(value, (list, tuple)):
            raise ValueError(f"{node.name} is a list that data is moved out of")
        if not isinstance(value, torch.Tensor):
            if value is None:
                raise ValueError(f"{node.name} carries no fake value (meta['val']) to tell its shape by")
            return value
        new = torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
        self.memory.define(new, ())
        self._hold(new, self.context.value(node))
        return new

    def _hold(self, tensor: torch.Tensor, number: int) -> None:
        self.memory.define(tensor, contents.run(number, tensor.nbytes, contents.EXACT, tensor.dtype))


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in ``value``, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for item in value for one in tensors(item)] if isinstance(value, (list, tuple)) else []


def _into_launches(context: Context) -> tuple[Set[fx.Node], Set[fx.Node]]:
    """Nodes through which data moves into launches, and new buffers that data is moved into."""
    packed: set[fx.Node] = set()
    storages: set[fx.Node] = set()
    buffers: set[fx.Node] = set()
    for node in reversed(context.nodes):
        if node.op != "call_function":
            continue
        operator = context.operator(node)
        if operator.moves:
            leads = node in packed
            if operator.effects.writes:
                targets = [base(target) for target in written_arguments(node)]
                buffers.update(one for one in targets if one.op == "call_function" and context.operator(one).is_new)
                leads = leads or any(target in storages for target in targets)
        else:
            leads = operator.launches in FOLLOWED
        if leads:
            packed.update(inputs_of(node))
            storages.update(map(base, inputs_of(node)))
    return packed, buffers
