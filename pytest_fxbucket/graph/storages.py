"""Two questions about memory: which storages a value may live in, and in which buffer, and part of it, operators put it.

Who moves nodes asks the first (:class:`Storages`): what may share memory must keep its order, so it goes by operators, by the
identity of fake values, and by what both leave open. Who follows bytes, or says that a graph is wrong, asks the second
(:func:`place`): it goes by schemas alone, parts of one buffer are apart, and what merely may be shared accuses nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import Effects, shared, written_arguments
from pytest_fxbucket.graph.ops import held_by, is_view, operator_name, overload, returns_written

if TYPE_CHECKING:
    from torch import fx

Numbers = tuple[int, ...]


class Storages:
    """Storages that all nodes of a graph may live in, in graph order, each with its effects. Found out when first asked for.

    Numbers stand for storages, in order of first appearance. Two that turn out to be one (``wait_tensor`` gives its very input,
    whatever its fake value says) are joined: a union-find with path halving (R. E. Tarjan, J. van Leeuwen, 1984).
    """

    def __init__(self, nodes: Sequence[fx.Node], effects: Sequence[Effects]) -> None:
        self._unmet = list(zip(nodes, effects, strict=True))
        self._parent: list[int] = []
        self._of_key: dict[object, int] = {}
        self._of: dict[fx.Node, Numbers] = {}

    def _meet_all(self) -> None:
        unmet, self._unmet = self._unmet, []
        for node, effects in unmet:
            self._meet(node, effects)

    def _meet(self, node: fx.Node, effects: Effects) -> None:
        own = self._own(node, effects)
        if effects.shares or effects.shares_all or effects.everything:
            others = self.of_all(shared(node, effects))
            if effects.joins:
                others = tuple({self._join(others[0], number) for number in others})
            own = self._joined(own, others)
        self._of[node] = own

    def of(self, node: fx.Node) -> Numbers:
        """Storages of ``node``'s result, ascending."""
        if self._unmet:
            self._meet_all()
        found = self._of[node]
        if len(found) == 1:
            return (self._root(found[0]),)
        return tuple(sorted({self._root(number) for number in found})) if found else ()

    def of_all(self, nodes: list[fx.Node]) -> Numbers:
        """Storages of the results of ``nodes``, ascending."""
        if len(nodes) == 1:
            return self.of(nodes[0])
        return tuple(sorted({number for node in nodes for number in self.of(node)}))

    def _own(self, node: fx.Node, effects: Effects) -> Numbers:
        """By the fake value alone; without one a storage of its own, unless it shares its inputs'."""
        if node.op == "get_attr":
            return self._of_attribute(node)
        if "val" in node.meta:
            return self._of_value(node.meta["val"])
        may_share = effects.shares or effects.shares_all or effects.everything
        if node.op == "output" or not effects.gives or (may_share and node.all_input_nodes):
            return ()
        return (self._number(node),)

    def _of_value(self, value: Any) -> Numbers:
        if isinstance(value, torch.Tensor):
            return (self._of_tensor(value),)
        if isinstance(value, (list, tuple)):
            return tuple(sorted({number for item in value for number in self._of_value(item)}))
        return ()

    def _of_tensor(self, value: torch.Tensor) -> int:
        try:
            return self._number(storage_key(value))
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have no storage to name
            return self._number(("tensor", id(value)))

    def _of_attribute(self, node: fx.Node) -> Numbers:
        """The same attribute is one storage; so are two that hold one tensor."""
        number = self._number(("attribute", str(node.target)))
        for value in (held_by(node.graph.owning_module, str(node.target)), node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                number = self._join(number, self._of_tensor(value))
        return (number,)

    def _joined(self, own: Numbers, others: Numbers) -> Numbers:
        if not own or not others:
            return own or others
        mine = {self._root(number) for number in own}
        if mine.issubset(others):
            return own
        if len(mine) == len(others) == 1:
            return (self._join(own[0], others[0]),)
        return tuple(sorted(mine.union(others)))

    def _number(self, key: object) -> int:
        number = self._of_key.setdefault(key, len(self._parent))
        if number == len(self._parent):
            self._parent.append(number)
        return number

    def _root(self, number: int) -> int:
        parent = self._parent
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    def _join(self, one: int, other: int) -> int:
        low, high = sorted((self._root(one), self._root(other)))
        self._parent[high] = low
        return low


def is_part(node: fx.Node) -> bool:
    """Whether ``node`` takes a part of a list, and so reads no data."""
    if node.target is not getitem or not node.all_input_nodes:
        return False
    return isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple))


# The buffer under a node, as the operators on the way to it tell.


_PARTED = ("aten::split", "aten::unsafe_split", "aten::chunk", "aten::tensor_split", "aten::unbind")
"""What the names of operators begin with whose results have no element in common, be they views or copies."""
_COALESCED = "_coalesced"
"""What the names of launches end in of which each result is new memory of its own."""


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """Where a node's result lies: a storage, and which part of it for each list of parts on the way there."""

    storage: fx.Node
    parts: Mapping[fx.Node, object]

    def meets(self, other: StoragePlace) -> bool:
        """Whether both may have an element in common."""
        parted = any(other.parts.get(parts, index) != index for parts, index in self.parts.items())
        return self.storage is other.storage and not parted


def place(node: fx.Node) -> StoragePlace:
    """Where ``node``'s result lies, back through views, their parts, waits, and results of writes."""
    parts: dict[fx.Node, object] = {}
    while True:
        if node.target is getitem and overload(node.all_input_nodes[0]) is not None:
            index = node.args[1]
            name = operator_name(node.all_input_nodes[0])
            if (name.startswith(_PARTED) or name.endswith(_COALESCED)) and isinstance(index, int) and index >= 0:
                parts[node.all_input_nodes[0]] = index
            node = node.all_input_nodes[0]
        elif (is_view(node) or collectives.is_wait(node) or node.target is getitem) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif returns_written(node) and (written := written_arguments(node)):
            node = written[0]
        else:
            return StoragePlace(node, parts)


def base(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares."""
    return place(node).storage
