"""Which storages of a graph live when, by fake values: what a rank holds while it runs each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, sent_by, tensors, tensors_sent, waits_of
from pytest_fxbucket.graph.modules import direction_of, module_of

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.step.roles import Value

Kind = Literal["parameter", "buffer", "state", "batch", "gathered", "gradient", "activation", "communication", "temporary"]
_KIND_OF_ROLE: Mapping[str, Kind] = {
    "param": "parameter",
    "buffer": "buffer",
    "held": "buffer",
    "state": "state",
    "hyper": "state",
    "batch": "batch",
    "grad": "gradient",
    "whole": "gathered",
    "unreduced": "gradient",
    "crossing": "activation",
    "value": "temporary",
    "carried": "activation",
    "loss": "temporary",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation."""

    bytes: int
    first: int
    """Position of the node that makes it; -1 of an input."""
    last: int
    """Position of the last node that needs it; of what is held throughout, and of outputs, the graph's last."""
    node: str
    """Name of the node that makes it."""
    module: str
    """FQN of the module that it was made in; of an input its own."""
    kind: Kind


@dataclass(frozen=True)
class Liveness:
    """All allocations of one graph."""

    storages: tuple[Storage, ...]
    at: tuple[int, ...]
    """Bytes that live while each node runs."""

    @property
    def peak(self) -> int:
        """Most bytes that live at once."""
        return max(self.at, default=0)

    @property
    def peak_at(self) -> int:
        """Position of the first node at which so many live."""
        return self.at.index(self.peak) if self.at else 0

    def alive(self, place: int) -> list[Storage]:
        """What lives while the node at ``place`` runs, the largest first."""
        found = [one for one in self.storages if one.first <= place <= one.last]
        return sorted(found, key=lambda one: (-one.bytes, one.first, one.node))


def liveness_of(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], rounding: int = 1) -> Liveness:
    """Read it off ``graph``, linear in its nodes and their inputs.

    Inputs are the caller's, and live throughout; so do outputs once they are made. What is sent lives until its wait.
    """
    nodes = list(graph.nodes)
    index = {node: place for place, node in enumerate(nodes)}
    walk = _Walk(index)
    for node in nodes:
        walk.meet(node)
    end = len(nodes) - 1
    roles = {node: value for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)}
    made = _made_for(graph, outputs)
    storages = []
    for root in walk.roots():
        maker = nodes[root.first]
        held = maker.op in ("placeholder", "get_attr")
        value = roles.get(maker)
        size = -(-root.bytes // rounding) * rounding
        kind = _KIND_OF_ROLE[value.role] if value is not None else _kind(maker, nodes[root.last], made.get(root.key))
        module = value.fqn if value is not None else module_of(maker)
        storages.append(Storage(size, -1 if held else root.first, end if held else root.last, maker.name, module, kind))
    change = [0] * (end + 2)
    for one in storages:
        change[max(one.first, 0)] += one.bytes
        change[one.last + 1] -= one.bytes
    return Liveness(tuple(storages), tuple(accumulate(change))[: end + 1])


@dataclass(slots=True)
class _Root:
    key: int
    first: int
    last: int
    bytes: int


class _Walk:
    """Joins values into storages: by the storage of fake values, and a wait with what it waits for."""

    def __init__(self, index: Mapping[fx.Node, int]) -> None:
        self._index = index
        self._root_of: dict[int, _Root] = {}
        self._keys: dict[fx.Node, list[int]] = {}

    def roots(self) -> list[_Root]:
        """Storages in the order in which they are made."""
        return sorted({id(one): one for one in self._root_of.values()}.values(), key=lambda one: (one.first, one.key))

    def meet(self, node: fx.Node) -> None:
        """Note what ``node`` makes, and how long its value is needed."""
        values = tensors(node.meta.get("val")) if node.op != "output" else []
        place = self._index[node]
        last = max((self._index[user] for user in node.users), default=place)
        if launch_kind(node) is not None:
            self._hold_sent(node)
        if is_wait(node) and isinstance(source := sent_by(node), type(node)):
            self._alias(node, source, values)
        for value in values:
            key = storage_key(value)
            root = self._root_of.get(key)
            if root is None:
                root = self._root_of[key] = _Root(key, place, place, value.untyped_storage().nbytes())
            root.last = max(root.last, last)
        self._keys[node] = [storage_key(value) for value in values]

    def _alias(self, wait: fx.Node, source: fx.Node, values: Sequence[torch.Tensor]) -> None:
        for value, key in zip(values, self._keys.get(source, ()), strict=False):
            self._root_of.setdefault(storage_key(value), self._root_of[key])

    def _hold_sent(self, launch: fx.Node) -> None:
        waits = waits_of(launch)
        until = max((self._index[wait] for wait in waits), default=self._index[launch])
        for source in tensors_sent(launch):
            for key in self._keys.get(source, ()):
                self._root_of[key].last = max(self._root_of[key].last, until)


def _made_for(graph: fx.Graph, outputs: Sequence[Value]) -> dict[int, Value]:
    """By storage the output that it is."""
    found: dict[int, Value] = {}
    returned = graph.output_node().args[0]
    for node, value in zip(returned if isinstance(returned, (list, tuple)) else [returned], outputs, strict=False):
        for tensor in tensors(getattr(node, "meta", {}).get("val")):
            found.setdefault(storage_key(tensor), value)
    return found


def _kind(maker: fx.Node, last: fx.Node, given_out: Value | None) -> Kind:
    if given_out is not None:
        return _KIND_OF_ROLE[given_out.role]
    kind = launch_kind(maker)
    if kind == "all_gather":
        return "gathered"
    if kind is not None or any(launch_kind(user) is not None for user in maker.users):
        return "communication"
    if direction_of(maker) == "forward" and direction_of(last) != "forward":
        return "activation"
    return "temporary"
