"""What a graph's attributes and storages hold while it is walked.

Attributes are known by their bytes, since a pass may rename them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph.effects import effects_of, shared, written
from pytest_fxbucket.same.exact import Ranks
from pytest_fxbucket.same.table import ExpressionTable, Key, OperatorEffect, read
from pytest_fxbucket.step.portable import digest, encode_module, raw_bytes


def digest_of(root: torch.nn.Module, name: str) -> str:
    """Digest of the attribute ``name`` of ``root``: a tensor's bytes, or a graph; for anything else its type and name."""
    held = attrgetter(name)(root)
    if isinstance(held, fx.GraphModule):
        return f"graph {digest(encode_module(held))}"
    if not isinstance(held, torch.Tensor):
        return f"{type(held).__qualname__} {name}"
    form = repr((held.dtype, tuple(held.shape), held.stride(), held.device.type))
    try:
        return hashlib.sha256(form.encode() + raw_bytes(held)).hexdigest()
    except (NotImplementedError, RuntimeError):  # A fake tensor has no bytes.
        return f"{form} {name}"


# States of storages that are written in place: which values share a storage, and the chain of writes to it so far.


Home = tuple[Any, ...]


class States:
    """Storages of one graph, by what operators say and never by fake values, and the state of each that was written.

    ``homes`` names the storage of each input that shares one with another input, by the input's place.
    """

    def __init__(self, nodes: Sequence[fx.Node], root: torch.nn.Module, homes: Mapping[int, Any]) -> None:
        self.state: dict[Any, int] = {}
        """For each storage that was written the expression of its last write, which contains all earlier ones."""
        self._homes: dict[fx.Node, Home] = {}
        self.changing = any(written(node) for node in nodes)
        """Whether anything is written at all."""
        if self.changing:
            self._find(nodes, root, homes)

    def _find(self, nodes: Iterable[fx.Node], root: torch.nn.Module, homes: Mapping[int, Any]) -> None:
        place = 0
        for index, node in enumerate(nodes):
            if node.op == "placeholder":
                self._homes[node] = (homes.get(place, index),)
                place += 1
            elif node.op == "get_attr":
                self._homes[node] = (_of_attribute(root, str(node.target)),)
            else:
                self._homes[node] = self._of(index, node)

    def _of(self, index: int, node: fx.Node) -> Home:
        """Storages of ``node``: of a view those of its input; one of its own as well if ``node`` merely may share."""
        effects = effects_of(node)
        if not (effects.shares or effects.shares_all or effects.everything):
            return (index,)
        found = dict.fromkeys(home for source in shared(node, effects) for home in self._homes[source])
        return (*found,) if effects.shares and found else (*found, index)

    def of(self, node: fx.Node) -> Home:
        """Storages that ``node``'s result may live in."""
        return self._homes[node]

    def now(self, node: fx.Node) -> tuple[int, ...]:
        """States of ``node``'s storages (0 for one that was not written); empty if none of them was written yet."""
        if not self.state:
            return ()
        homes = self._homes[node]
        if not any(home in self.state for home in homes):
            return ()
        return tuple(self.state.get(home, 0) for home in homes)


def _of_attribute(root: torch.nn.Module, name: str) -> object:
    """The storage of the attribute ``name``: two attributes that hold one tensor share it."""
    held = attrgetter(name)(root)
    return ("storage", storage_key(held)) if isinstance(held, torch.Tensor) else name


class WalkContext:
    """What the parts of one walk share: the graph, its expressions so far, and the states of its storages.

    ``root`` holds the constants of ``graph``, ``table`` has all expressions, ``members`` the ranks of each process group that
    the graph names. ``homes`` is as for :class:`States`.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: torch.nn.Module,
        table: ExpressionTable,
        members: Mapping[str, Ranks],
        homes: Mapping[int, Any],
    ) -> None:
        self.nodes = list(graph.nodes)
        self.root, self.table, self.members = root, table, members
        self.node_of: dict[int, fx.Node] = {}
        """The node at which each expression of the graph is met first."""
        self.made: dict[fx.Node, int] = {}
        """The expression of each node, as long as nobody writes its storage."""
        self.states = States(self.nodes, root, homes)
        self._operators: dict[int, OperatorEffect] = {}
        self._first = len(table)

    def number(self, key: Key, node: fx.Node) -> int:
        """The number of the expression ``key``, met at ``node``."""
        number = self.table.number(key)
        self.node_of.setdefault(number, node)
        return number

    def learn(self, number: int, value: Any) -> None:
        """Note a fake value of the expression ``number``, unless an earlier graph has that expression."""
        # The graph before the pass is walked first, and what a pass writes into ``meta["val"]`` must not replace its values.
        if number >= self._first and number not in self.table.facts:
            self.table.facts[number] = value

    def operator(self, node: fx.Node) -> OperatorEffect:
        """What is known of the target that ``node`` calls."""
        found = self._operators.get(id(node.target))
        if found is None:
            found = self._operators[id(node.target)] = read(node)
        return found

    def value(self, node: fx.Node) -> int:
        """The expression that ``node`` stands for now; not for nodes that are told by their bytes."""
        # Behind a write the same node is another expression: its own as seen in the present states of its storages.
        made = self.made[node]
        if self.states.state and (states := self.states.now(node)):
            return self.number(("seen", made, states), node)
        return made
