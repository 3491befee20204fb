"""What is known of one graph while it is walked: its expressions so far, and the operators that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.same import ops
from pytest_fxbucket.same.exact import Ranks
from pytest_fxbucket.same.ops import Operator
from pytest_fxbucket.same.states import States
from pytest_fxbucket.same.table import Key, Table

if TYPE_CHECKING:
    from torch import fx


class Context:
    """``graph``, whose constants ``root`` holds, in terms of ``table``.

    ``members`` are the ranks of each process group that it names, ``homes`` the storages of inputs that share one.
    """

    def __init__(
        self, graph: fx.Graph, root: torch.nn.Module, table: Table, members: Mapping[str, Ranks], homes: Mapping[int, Any]
    ) -> None:
        self.nodes = list(graph.nodes)
        self.root, self.table, self.members = root, table, members
        self.node_of: dict[int, fx.Node] = {}
        """Where each expression of the graph is met at first."""
        self.made: dict[fx.Node, int] = {}
        """What each node stands for, as long as nobody writes its storage."""
        self.states = States(self.nodes, root, homes)
        self._operators: dict[int, Operator] = {}
        self._first = len(table)

    def number(self, key: Key, node: fx.Node) -> int:
        """The number of the expression ``key``, met at ``node``."""
        number = self.table.number(key)
        self.node_of.setdefault(number, node)
        return number

    def learn(self, number: int, value: Any) -> None:
        """A fake value of the expression ``number``; of one that an earlier graph has, only that graph is believed."""
        if number >= self._first and number not in self.table.facts:
            self.table.facts[number] = value

    def operator(self, node: fx.Node) -> Operator:
        """What is known of the target that ``node`` calls."""
        found = self._operators.get(id(node.target))
        if found is None:
            found = self._operators[id(node.target)] = ops.read(node)
        return found

    def value(self, node: fx.Node) -> int:
        """What ``node``, which is not told by its bytes, stands for now."""
        made = self.made[node]
        if self.states.state and (states := self.states.now(node)):
            return self.number(("seen", made, states), node)
        return made
