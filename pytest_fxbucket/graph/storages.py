"""Two views of memory: the storages that a value may live in, and the buffer (and part of it) that operators put it in.

Code that moves nodes uses :class:`Storages`. Nodes that may share memory must keep their order, so sharing is read off
operators and the identity of fake values, and assumed where both leave it open. Code that follows bytes, or reports a wrong
graph, uses :func:`place`. It goes by schemas alone, keeps parts of one buffer apart, and assumes no sharing that is merely
possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import Effects, effects_of, shared, written_arguments
from pytest_fxbucket.graph.ops import held_by, is_view, operator_name, overload, returns_written

if TYPE_CHECKING:
    from torch import fx

Numbers = tuple[int, ...]


class Storages:
    """The storages that each node of a graph may live in; ``nodes`` are in graph order. Computed at the first question.

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
                # ``set_`` gives a tensor another storage. Numbers hold for the whole graph, so both storages count as one.
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
        """Storages by the fake value alone. Without one: a new storage, or none yet if the node may share its inputs'."""
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
        if mine.issubset(others):  # The fake value says which of the storages that the operator may share it is.
            return own
        if len(mine) == len(others) == 1:
            # The fake value says new memory, the operator says shared: both numbers then mean one storage.
            return (self._join(own[0], others[0]),)
        # Several candidates: joining them all would order nodes that have nothing to do with each other.
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
        # The lower number stays, so that storages keep the order of their first appearance.
        low, high = sorted((self._root(one), self._root(other)))
        self._parent[high] = low
        return low


def is_part(node: fx.Node) -> bool:
    """Whether ``node`` takes a part of a list, and so reads no data."""
    if node.target is not getitem or not node.all_input_nodes:
        return False
    return isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple))


# The buffer under a node, found by going back through operators that share memory.


_PARTED = ("aten::split", "aten::unsafe_split", "aten::chunk", "aten::tensor_split", "aten::unbind")
"""Beginnings of the names of operators whose several results have no element in common, be they views or copies."""
_COALESCED = "_coalesced"
"""Ending of the names of launches that give several results, each in new memory of its own."""


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """Where a node's result lies: a storage, and the index taken of each list of parts (a split, say) on the way there."""

    storage: fx.Node
    parts: Mapping[fx.Node, object]

    def meets(self, other: StoragePlace) -> bool:
        """Whether both may have an element in common."""
        # Only different parts of one and the same split are known to be apart; parts of two splits may overlap.
        parted = any(other.parts.get(parts, index) != index for parts, index in self.parts.items())
        return self.storage is other.storage and not parted


def place(node: fx.Node) -> StoragePlace:
    """Where ``node``'s result lies: goes back through views, parts of lists, waits and results of writes to the buffer."""
    parts: dict[fx.Node, object] = {}
    while True:
        if node.target is getitem and overload(node.all_input_nodes[0]) is not None:
            index = node.args[1]
            name = operator_name(node.all_input_nodes[0])
            # A negative index is not noted: as a number it differs from the positive one that means the same part.
            if (name.startswith(_PARTED) or name.endswith(_COALESCED)) and isinstance(index, int) and index >= 0:
                parts[node.all_input_nodes[0]] = index
            node = node.all_input_nodes[0]
        elif (is_view(node) or collectives.is_wait(node) or node.target is getitem) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif returns_written(node) and (written := written_arguments(node)):
            node = written[0]
        elif len(under := shared(node, effects_of(node))) == 1:
            node = under[0]
        else:
            return StoragePlace(node, parts)


def writes_beside(writer: fx.Node, node: fx.Node) -> bool:
    """Whether all that ``writer`` writes are other parts of the buffer that ``node`` is a part of, as an unpack gives them."""
    written, own = [place(one) for one in written_arguments(writer)], place(node)
    return bool(written) and all(one.storage is own.storage and not one.meets(own) for one in written)


def base(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares."""
    return place(node).storage
