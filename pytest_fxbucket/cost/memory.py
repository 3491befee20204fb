"""Which storages of a graph live when, by fake values: what a rank holds while it runs each node, in any order of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Literal

from torch import fx

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.graph.collectives import flight, flight_of, launch_kind, tensors, tensors_sent
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.effects import shared as shared_by
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.ops import MAYBE_VIEWS, by_operator, held_by, is_view_operator, operator_name
from pytest_fxbucket.graph.storages import is_part

if TYPE_CHECKING:
    import torch

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


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation."""

    bytes: int
    first: int
    """Position of the node that makes it; -1 of what is there before."""
    last: int
    """Position of the last node that needs it; of what is held throughout, and of outputs, the graph's last."""
    maker: fx.Node
    """The node that makes it, or is it."""
    ender: fx.Node
    """The last node that needs it."""
    value: Value | None = None
    """The input or output that it is."""

    @property
    def node(self) -> str:
        """Name of the node that makes it."""
        return self.maker.name

    @property
    def module(self) -> str:
        """FQN of the module that it was made in; of an input or output its own."""
        return self.value.fqn if self.value is not None and self.value.fqn else module_of(self.maker)

    @property
    def kind(self) -> Kind:
        """What it holds."""
        if self.value is not None:
            return _KIND_OF_ROLE[self.value.role]
        kind = launch_kind(self.maker)
        if kind == "all_gather":
            return "gathered"
        # What a launch brings, or what is made to be sent.
        if kind is not None or any(launch_kind(user) is not None for user in self.maker.users):
            return "communication"
        if direction_of(self.maker) == "forward" and direction_of(self.ender) != "forward":
            return "activation"
        return "temporary"


_BLOCK = 256
"""Nodes whose most is known together."""


@dataclass(frozen=True)
class Liveness:
    """All allocations of one graph."""

    storages: tuple[Storage, ...]
    at: tuple[int, ...]
    """Bytes that live while each node runs."""
    inputs: tuple[tuple[Storage, ...], ...] = ()
    """Of each input what it lives in."""
    outputs: tuple[tuple[Storage, ...], ...] = ()

    @cached_property
    def peak(self) -> int:
        """Most bytes that live at once."""
        return max(self.at, default=0)

    def most(self, first: int, last: int) -> int:
        """Most bytes that live at once while the nodes from ``first`` to ``last`` run; cheap to ask often."""
        # Whole blocks are known; only what sticks out at either end is looked at node by node.
        begin, end = -(-first // _BLOCK), (last + 1) // _BLOCK
        if begin >= end:  # no whole block lies between the two
            return max(self.at[first : last + 1])
        edges = (*self.at[first : begin * _BLOCK], *self.at[end * _BLOCK : last + 1])
        return max((*self._blocks[begin:end], *edges))

    @cached_property
    def _blocks(self) -> list[int]:
        return [max(self.at[n : n + _BLOCK]) for n in range(0, len(self.at), _BLOCK)]

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

    Inputs are the caller's, and live throughout; outputs live once they are made. Other values end with their last user, as in
    the code that torch generates. What is sent lives until its wait; without one, to the end.
    """
    nodes = list(graph.nodes)
    walk = Walk(iter(inputs))
    for place, node in enumerate(nodes):
        walk.meet(place, node)
    returned = walk.end(nodes[-1], len(nodes) - 1, outputs)
    # At each node what begins to live less what has ended before it: the running sum is what lives there.
    change = [0] * (len(nodes) + 1)
    for one in walk.storages:
        one.bytes = -(-one.bytes // rounding) * rounding
        change[max(one.first, 0)] += one.bytes
        change[one.last + 1] -= one.bytes
    taken = tuple([walk.of[node] for node in nodes if node.op == "placeholder"])
    return Liveness(tuple(walk.storages), tuple(accumulate(change))[:-1], taken, returned)


_Shares = Literal["all", "some"]
"""Which storages of an input a result lives in: all, or those alone that its own fake value has, too."""


def _by_schema(op: torch._ops.OpOverload) -> _Shares:
    # A wait, or an operator that returns what it writes, gives its very input, whatever fake value it was given.
    returns = [one.alias_info for one in op._schema.returns]
    if flight(op) == "wait" or (len(returns) == 1 and returns[0] is not None and returns[0].is_write):
        return "all"
    return "all" if is_view_operator(op) and op._schema.name not in MAYBE_VIEWS else "some"


_HOLD = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds of launches that read what they are given until their wait; others work in place, on it or on a copy."""
_SOME: _Shares = "some"
_how = by_operator(_by_schema, _SOME)


class Walk:
    """Meets nodes in order; notes who makes a storage, and who needs it last.

    Operators decide first which values share a storage, fake values only what operators leave open: a copy of a node has the
    fake value of its original, and still makes a storage of its own.
    """

    def __init__(self, inputs: Iterator[Value | None]) -> None:
        self.storages: list[Storage] = []
        self._inputs = inputs
        self.of: dict[fx.Node, tuple[Storage, ...]] = {}
        self._begins: dict[fx.Node, list[int]] = {}
        """Of a node that gives a list: where each item's tensors begin among all in the list, and at the end their number."""
        self._held: dict[object, Storage] = {}
        """Storages of inputs and attributes."""
        self._sent: dict[Storage, list[Storage]] = {}
        """For each storage that a launch brings and that was not waited for: the storages that this launch sends."""

    def meet(self, place: int, node: fx.Node) -> None:
        """Note what ``node`` makes and needs."""
        if node.op in ("placeholder", "get_attr"):
            self.of[node] = self._outside_storages(node)
            return
        for source in inputs_of(node):
            for storage in self.of[source]:
                self.need(storage, place, node)
        if node.op != "output":
            self.of[node] = self._gives(node, place)
        kind = flight_of(node)
        if kind == "wait":
            # A wait shares storage with what its launch brought, which finds the launch through any views between.
            for brought in self.of[node]:
                for storage in self._sent.pop(brought, ()):
                    self.need(storage, place, node)
        elif kind in _HOLD:
            sent = [storage for source in tensors_sent(node) for storage in self.of[source]]
            self._sent.update(dict.fromkeys(self.of[node], sent))

    def need(self, storage: Storage, place: int, node: fx.Node) -> None:
        """Note that ``node`` needs ``storage``; places ascend."""
        storage.last, storage.ender = place, node

    def end(self, output: fx.Node, place: int, outputs: Sequence[Value]) -> tuple[tuple[Storage, ...], ...]:
        """Hold to the end inputs, and what was sent and never waited for; give the storages of outputs, with roles noted."""
        unwaited = (storage for sent in self._sent.values() for storage in sent)
        for storage in (*self._held.values(), *unwaited):
            self.need(storage, place, output)
        returned = output.args[0]
        listed = returned if isinstance(returned, (list, tuple)) else [returned]
        found = tuple([self.of[node] if isinstance(node, fx.Node) else () for node in listed])
        for storages, value in zip(found, outputs, strict=False):
            for storage in storages:
                storage.value = storage.value or value  # an input that is returned stays an input
        return found

    def _outside_storages(self, node: fx.Node) -> tuple[Storage, ...]:
        value = next(self._inputs) if node.op == "placeholder" else None
        held = node.meta.get("val") if value or "val" in node.meta else held_by(node.graph.owning_module, str(node.target))
        found = []
        for tensor in tensors(held):
            key = storage_key(tensor)
            # Inputs that are views of one tensor have one storage, and so have attributes of one.
            if key not in self._held:
                self._held[key] = Storage(tensor.untyped_storage().nbytes(), -1, -1, node, node, value)
                self.storages.append(self._held[key])
            found.append(self._held[key])
        return tuple(found)

    def _gives(self, node: fx.Node, place: int) -> tuple[Storage, ...]:
        value, effects = node.meta.get("val"), effects_of(node)
        shared = shared_by(node, effects) if effects.shares or effects.everything or effects.shares_all else ()
        if not shared:
            return tuple([self._new_storage(tensor, place, node) for tensor in tensors(value)])
        if is_part(node):
            return self._part(node)
        if _how(node) == "all":
            return self.of[shared[0]]
        known: dict[int, Storage] = {}
        for source in shared:
            known.update(zip(map(storage_key, tensors(source.meta.get("val"))), self.of[source], strict=False))
        found = [known.get(storage_key(one)) for one in tensors(value)]
        # Such an operator copies only what lies otherwise than it should, even if fake values name two storages.
        if found == [None] and operator_name(node) in MAYBE_VIEWS and _lies_the_same(shared[0].meta.get("val"), value):
            return self.of[shared[0]]
        return tuple([one or self._new_storage(tensor, place, node) for one, tensor in zip(found, tensors(value), strict=True)])

    def _part(self, node: fx.Node) -> tuple[Storage, ...]:
        source, index = node.all_input_nodes[0], node.args[1]
        of, values = self.of[source], source.meta["val"]
        if source not in self._begins:  # once for all parts: a fused update gives thousands
            self._begins[source] = list(accumulate([len(tensors(one)) for one in values], initial=0))
        begins = self._begins[source]
        if len(of) != begins[-1] or not isinstance(index, int):  # all are parts of one
            return of
        index = index % (len(begins) - 1)  # a negative one counts from the end
        return of[begins[index] : begins[index + 1]]

    def _new_storage(self, tensor: torch.Tensor, place: int, node: fx.Node) -> Storage:
        made = Storage(tensor.untyped_storage().nbytes(), place, place, node, node)
        self.storages.append(made)
        return made


def _lies_the_same(source: object, value: object) -> bool:
    """Whether a copy of ``source`` would be needless: it has all elements of ``value`` in their order."""
    both = (*tensors(source), *tensors(value))
    return len({one.dtype for one in both}) == 1 and all(one.is_contiguous() for one in both)


class StorageNeeds(Walk):
    """Like :func:`liveness_of`, but keeps all nodes that need a storage: then any other order of the nodes takes only sums."""

    def __init__(self, graph: fx.Graph, rounding: int = 1) -> None:
        super().__init__(repeat(None))
        self._places: dict[Storage, list[int]] = {}
        self._peaks: dict[tuple[int, ...], int] = {}
        nodes = list(graph.nodes)
        for place, node in enumerate(nodes):
            self.meet(place, node)
        self.end(nodes[-1], len(nodes) - 1, ())
        self._lives = [
            (-(-one.bytes // rounding) * rounding, one.first, tuple(dict.fromkeys(self._places.get(one, ()))))
            for one in self.storages
        ]

    def need(self, storage: Storage, place: int, node: fx.Node) -> None:
        """Note it."""
        # All places are kept: in another order any of them may be the last.
        self._places.setdefault(storage, []).append(place)

    def at(self, order: Sequence[int]) -> list[int]:
        """Bytes that live while each node of ``order`` runs; nodes are named by their place in the graph."""
        place = [0] * len(order)
        for now, before in enumerate(order):
            place[before] = now
        change = [0] * (len(order) + 1)
        for size, first, needs in self._lives:
            begin = place[first] if first >= 0 else 0
            change[begin] += size
            change[max([place[one] for one in needs], default=begin) + 1] -= size
        return list(accumulate(change))[:-1]

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes that live at once in ``order``; kept, since orders are asked for again."""
        key = tuple(order)
        if key not in self._peaks:
            self._peaks[key] = max(self.at(key))
        return self._peaks[key]

    def bytes_made(self, node: fx.Node) -> int:
        """Bytes of the storages of ``node``'s value."""
        return sum(one.bytes for one in self.of.get(node, ()))
