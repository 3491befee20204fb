"""The order that a graph's nodes must keep: by their edges, and by dependences that edges do not show.

Those are reads and writes of one storage, collectives in flight, random numbers, effects on the world, and operators that say
nothing about themselves. They are found in one walk and always lead back in graph order, so they cannot form a circle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.fx import inputs_of
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import Effects, arguments_of, effects_of, written
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import UNWRITTEN, operator_name
from pytest_fxbucket.graph.storages import Numbers, Storages, is_part, writes_beside

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class Order:
    """Which nodes of a graph must stay before which. Nodes are named by their index in graph order."""

    nodes: tuple[fx.Node, ...]
    index: dict[fx.Node, int]
    before: list[tuple[int, ...]]
    """For each node the nodes that must stay before it, ascending: its inputs, and dependences that edges do not show."""
    barriers: tuple[str, ...]
    """A sentence for each node that nothing may pass."""
    _storages: Storages
    _writers: dict[int, list[int]]

    def storages(self, node: fx.Node) -> frozenset[int]:
        """Storages that ``node``'s result lives in; those of all its tensors, if it has several."""
        return frozenset(self._storages.of(node))

    def writers(self, storage: int) -> tuple[int, ...]:
        """Nodes that write ``storage``, ascending. A collective in place writes it at its launch, and until its wait."""
        return tuple(self._writers.get(storage, ()))

    def writing(self, node: fx.Node) -> tuple[int, ...]:
        """Nodes that write where ``node``'s result lives, ascending."""
        if not self._writers:
            return ()
        return tuple(sorted({index for storage in self._storages.of(node) for index in self._writers.get(storage, ())}))

    def readers(self, storage: int) -> tuple[int, ...]:
        """Nodes that are given ``storage``, ascending, views and waits among them."""
        return tuple(self._readers.get(storage, ()))

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for storage in () if is_part(node) else self._storages.of_all(arguments_of(node)):
                found.setdefault(storage, []).append(index)
        return found


def order_of(graph: fx.Graph) -> Order:
    """Read the order of ``graph``, near-linear in its nodes and their inputs. Changes nothing; needs no fake values.

    Raises :class:`PassError` for a graph in which a node stands before one of its inputs.
    """
    nodes = tuple(graph.nodes)
    effects = [effects_of(node) for node in nodes]
    storages = Storages(nodes, effects)
    walk = _Walk(storages, _written(nodes, effects, storages))
    index = {node: i for i, node in enumerate(nodes)}
    place_of = index.__getitem__
    before: list[tuple[int, ...]] = []
    for i, (node, does) in enumerate(zip(nodes, effects, strict=True)):
        # Most graphs are functional, and there most nodes only have their inputs before them: the walk is asked for the rest.
        inputs: Iterable[int] = map(place_of, inputs_of(node))
        if walk.asks or does.random or does.chained or does.barrier or node.op == "output":
            earlier = set(inputs)
            walk.step(i, node, does, earlier)
            inputs = earlier
        needed = tuple(sorted(inputs))
        if needed and needed[-1] >= i:
            raise PassError(f"the graph is not in order: {node.name} stands before {nodes[needed[-1]].name}, which it needs")
        before.append(needed)
    return Order(nodes, index, before, tuple(walk.barriers), storages, walk.writers)


def _written(nodes: Iterable[fx.Node], effects: Iterable[Effects], storages: Storages) -> set[int]:
    """Storages that anything writes; all others need no order."""
    return {
        storage
        for node, does in zip(nodes, effects, strict=True)
        if does.writes or does.everything
        for storage in storages.of_all(written(node))
    }


Flight = tuple[int, Numbers, Numbers]
"""A launch, the storages that it reads until its wait, and those that it writes until then."""


@dataclass
class _Walk:
    """What was met so far: the last write of every storage that is written, who read it since, and what is in flight.

    A read stays behind the last write of its storage; a write stays behind the last write and all reads since. A launch reads
    and writes until its wait, so both are noted at the launch and once more at the wait.
    """

    storages: Storages
    changing: set[int]
    """Storages that something writes."""
    writers: dict[int, list[int]] = field(default_factory=dict)
    barriers: list[str] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    since: dict[int, list[int]] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    """Changing storages that live on after the graph: inputs and attributes."""
    flying: dict[int, list[Flight]] = field(default_factory=dict)
    """Launches that nobody waited for yet, by the storage of their result."""
    sent: dict[fx.Node, Flight] = field(default_factory=dict)
    """Every launch: one may have several waits, one for each part of a coalesced result or more."""
    random: int = -1
    effect: int = -1
    barrier: int = -1

    @property
    def asks(self) -> bool:
        """Whether any node may have to stay behind more than its inputs: never before a barrier if the graph writes nothing."""
        return bool(self.changing) or self.barrier >= 0

    def step(self, i: int, node: fx.Node, does: Effects, earlier: set[int]) -> None:
        """Add to ``earlier`` what must stay before ``node``, the ``i``-th."""
        if self.barrier >= 0:
            earlier.add(self.barrier)
        if self.changing:
            self._touch(i, node, does, earlier)
        if does.random or does.chained:
            self._chain(i, does, earlier)
        if does.barrier:
            # All since the last barrier; what stands before that one is behind neither.
            earlier.update(range(max(self.barrier, 0), i))
            self.barrier = i
            self.barriers.append(f"{_called(node)} ({node.name}) {does.barrier}: nothing is moved past it")
        if node.op == "output":
            earlier.update(index for index in (self.random, self.effect) if index >= 0)

    def _touch(self, i: int, node: fx.Node, does: Effects, earlier: set[int]) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.outside.update(self.changing.intersection(self.storages.of(node)))
            return
        if is_part(node):
            return
        writes = self.storages.of_all(written(node)) if does.writes or does.everything else ()
        inputs = self.storages.of_all(arguments_of(node))
        reads = self.changing.intersection(inputs)
        if node.op == "output":
            # Callers see what was written to inputs and attributes when the graph returns, so such writes stay before it.
            reads |= self.outside
        self._read(i, sorted(reads.difference(writes)), earlier)
        self._write(i, writes, earlier)
        for storage in writes:
            self.writers.setdefault(storage, []).append(i)
        if does.flight == "launch":
            self._launch(node, (i, tuple(sorted(reads.difference(writes))), writes))
        elif does.flight == "wait":
            self._land(i, node, inputs, earlier)

    def _read(self, i: int, reads: Iterable[int], earlier: set[int], since: int = -1) -> None:
        """Node ``i`` reads. Writes before the node ``since`` are left out: ``since`` is behind them, and ``i`` behind it."""
        for storage in reads:
            if self.last.get(storage, -1) > since:
                earlier.add(self.last[storage])
            self.since.setdefault(storage, []).append(i)

    def _write(self, i: int, writes: Iterable[int], earlier: set[int]) -> None:
        for storage in writes:
            if storage in self.last:
                earlier.add(self.last[storage])
            earlier.update(self.since.pop(storage, ()))
            self.last[storage] = i
        earlier.discard(i)

    def _launch(self, node: fx.Node, flight: Flight) -> None:
        self.sent[node] = flight
        for storage in self.storages.of(node):
            self.flying.setdefault(storage, []).append(flight)

    def _land(self, i: int, node: fx.Node, arrived: Numbers, earlier: set[int]) -> None:
        """The wait ``i`` ends the reading and writing of its launch, and of all launches whose results are in ``arrived``."""
        flights = {self.sent[launch]: None for launch in _launches(node) if launch in self.sent}
        for storage in arrived:
            flights.update(dict.fromkeys(self.flying.pop(storage, ())))
        for launch, reads, writes in flights:
            self._read(i, reads, earlier, launch)
            self._write(i, writes, earlier)

    def _chain(self, i: int, does: Effects, earlier: set[int]) -> None:
        if does.random:
            if self.random >= 0:
                earlier.add(self.random)
            self.random = i
        if does.chained:
            if self.effect >= 0:
                earlier.add(self.effect)
            self.effect = i


def _launches(wait: fx.Node) -> Iterator[fx.Node]:
    """Nodes that may be the launch of ``wait``: its inputs and, for a coalesced launch, the node behind ``getitem``."""
    for source in arguments_of(wait):
        yield source
        if source.target is getitem:
            yield from source.all_input_nodes


def _called(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", type(target).__name__)
    return f"{module}.{name}" if module else str(name)


def compute_names(graph: fx.Graph) -> list[str]:
    """Names of the nodes of ``graph``, in its order, but for those that launch a collective or wait for one."""
    return [node.name for node in graph.nodes if not collectives.communicates(node)]


def displaced(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """(moved, counted): how many names are in both, and how many of them must have moved at least.

    Those that stayed are the longest run of names that has the same order in both (longest increasing subsequence, by patience
    sorting), so the count is the least that explains ``after``. O(n log n).
    """
    both = set(before).intersection(after)
    if [name for name in before if name in both] == [name for name in after if name in both]:
        return 0, len(both)  # nearly always: a good pass moves nothing but launches and waits
    place = {name: i for i, name in enumerate(before)}
    # piles[k] is the least last place of all increasing runs of k + 1 names, so the piles ascend, and there are as many of them
    # as the longest run has names.
    piles: list[int] = []
    counted = 0
    for name in after:
        if name in place:
            counted += 1
            at = bisect_left(piles, place[name])
            piles[at : at + 1] = [place[name]]
    return counted - len(piles), counted


# Which launches need each other, and which no pass may merge with others, and why.


@dataclass(frozen=True, slots=True)
class LaunchBounds:
    """Bounds of one launch, as positions in the graph."""

    blocked: int
    """Last node that the launch needs and that cannot be hoisted with it; -1 if there is none."""
    needed: int | None
    """First launch that needs the result of this one; None if none does."""


def needs_of(order: Order, launches: Sequence[fx.Node]) -> dict[fx.Node, LaunchBounds]:
    """Bounds of each of ``launches``. One walk down the graph and one up, O(nodes + edges)."""
    # Down: a node that moves freely is blocked by whatever blocks the nodes that it needs, a fixed one blocks by itself.
    # Up: each node hands the first launch that needs it (or itself, if it is one) on to the nodes that it needs.
    fixed = [not moves_freely(node) for node in order.nodes]
    blocked: list[int] = []
    for before in order.before:
        last = -1
        for earlier in before:
            last = max(last, earlier if fixed[earlier] else blocked[earlier])
        blocked.append(last)
    sent = {order.index[launch] for launch in launches}
    end = len(order.nodes)
    needed = [end] * end
    for index in range(end - 1, -1, -1):
        first = index if index in sent else needed[index]
        for earlier in order.before[index]:
            needed[earlier] = min(needed[earlier], first)
    at = {launch: order.index[launch] for launch in launches}
    return {launch: LaunchBounds(blocked[i], needed[i] if needed[i] < end else None) for launch, i in at.items()}


_NEVER_MERGED = ("all_reduce_", "all_reduce_coalesced_", "reduce_scatter_tensor_out")


def why_unmergeable(launch: fx.Node, order: Order) -> str:
    """Why ``launch`` must stay on its own; empty if it may share a bucket."""
    name = operator_name(launch)
    if not name.startswith("_c10d_functional::") or name.endswith(_NEVER_MERGED):
        return f"{name} is not merged"
    if collectives.argument(launch, "group_size") == 1:
        return "its group has one rank"
    waits = collectives.waits_of(launch)
    parts = [user for user in launch.users if user.target is getitem] or [launch]
    early = any(not collectives.is_wait(user) for part in parts for user in part.users if user not in parts)
    if not waits or early or any(not part.users for part in parts):
        return "it is read without a wait, or never"
    return _buffer(launch) or _changed(launch, waits, order)


def _buffer(launch: fx.Node) -> str:
    buffer = launch.kwargs.get("out")
    if not isinstance(buffer, torch.fx.Node):
        return ""
    return "" if operator_name(buffer) in UNWRITTEN and list(buffer.users) == [launch] else "its buffer is used elsewhere"


def _changed(launch: fx.Node, waits: list[fx.Node], order: Order) -> str:
    """Why ``launch`` cannot be merged if its input is written before all of its waits; empty if it is not."""
    begin, end = order.index[launch], min(order.index[wait] for wait in waits)
    for node in launch.all_input_nodes:
        if any(begin < i < end and not writes_beside(order.nodes[i], node) for i in order.writing(node)):
            return "what it sends is written before its wait"
    return ""


def moves_freely(node: fx.Node) -> bool:
    """Whether ``node`` may be hoisted with a launch that needs it.

    So may data movement (a pack), and compute that does not write, draw or act on the world; nothing that communicates.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    return not collectives.communicates(node) and (moves_data(node) or not effects_of(node).acts)
