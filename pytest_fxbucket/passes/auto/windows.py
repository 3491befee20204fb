"""Which nodes may move with launches and waits, and where those may stand: in slots, each before one node of compute.

Compute keeps its order. What only moves data goes with the launch that it packs for, or stays; so does what makes something of
parameters alone, for launches alone (a cast before a gather). Light compute that reads what a wait brings, such as the sum of
two all-reduced gradients, may be put off with the wait until something else needs it: products of matrices never are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import ROWS, communicates, is_wait, launch_kind, tensors_sent
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.order import moves_freely
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.arrange import arranged, readers
from pytest_fxbucket.passes.auto.machine import COMPUTE

if TYPE_CHECKING:
    from pytest_fxbucket.cost.memory import StorageNeeds
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.auto.machine import NodeCosts


class Nodes:
    """What is known of a graph's nodes, whatever its order."""

    def __init__(self, order: Order, machine: NodeCosts) -> None:
        self.order, self.machine = order, machine
        self.after = readers(order)
        """Of each node those that must stay behind it."""
        self.waits = _waits(order, machine)
        """Of each launch that somebody waits for its waits."""
        calls = [node.op == "call_function" and moves_freely(node) for node in order.nodes]
        self.moves = [free and moves_data(node) for free, node in zip(calls, order.nodes, strict=True)]
        """Whether it only moves data, and may be moved."""
        self._light = [free and not multiplies(node) for free, node in zip(calls, order.nodes, strict=True)]
        self.given = self._of_inputs_alone()
        """Whether each node is made of graph inputs alone, by nothing but light compute and moved data."""
        self.only = self._for_launches()
        """For each node that only launches read, directly or through nodes that go with them, the first of these; else -1."""
        lands = {wait for waits in self.waits.values() for wait in waits}
        self._lands = [index in lands for index in range(len(order.nodes))]

    def movable(self, *, sinks: bool) -> list[bool]:
        """Whether each node may move; ``sinks``: light compute, too, behind the wait that it reads."""
        # Launches, what packs for launches alone, waits, and what stands behind a wait with only such nodes in between.
        found, behind = list[bool](), list[bool]()
        for index, before in enumerate(self.order.before):
            follows = self.moves[index] or (sinks and self._light[index])
            behind.append(self._lands[index] or (follows and any(behind[one] for one in before)))
            packs = self.only[index] >= 0 and (self.moves[index] or self.given[index])
            found.append(behind[index] or packs or index in self.waits)
        return found

    def _of_inputs_alone(self) -> list[bool]:
        found: list[bool] = []
        for index, (node, before) in enumerate(zip(self.order.nodes, self.order.before, strict=True)):
            free = self._light[index] or node.op in ("placeholder", "get_attr")
            found.append(free and all(found[one] for one in before))
        return found

    def _for_launches(self) -> list[int]:
        # Backwards, so that all readers are known: a node goes with launches if each of its readers does.
        found = [-1] * len(self.after)
        nodes = self.order.nodes
        for index in range(len(nodes) - 1, -1, -1):
            if launch_kind(nodes[index]) is not None:
                found[index] = index
            elif self.after[index] and nodes[index].op != "placeholder" and (self.moves[index] or self.given[index]):
                owners = [found[reader] for reader in self.after[index]]
                # One reader that goes with no launch (-1) is enough.
                found[index] = min(owners) if min(owners) >= 0 else -1
        return found


def _waits(order: Order, machine: NodeCosts) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for index, node in enumerate(order.nodes):
        if is_wait(node) and machine.launch[index] >= 0:
            found.setdefault(machine.launch[index], []).append(index)
    return {launch: tuple(waits) for launch, waits in sorted(found.items())}


@dataclass(slots=True, eq=False)
class MovableCollective:
    """A collective that may be moved. Nodes are named by their place in the graph, slots by their number."""

    number: int
    launch: int
    waits: tuple[int, ...]
    stream: int
    seconds: float
    size: int
    """Bytes of the larger side."""
    low: int
    """First slot for its launch."""
    last: int
    """Last slot for its launch."""
    high: int
    """Last slot for its waits."""
    pack: float
    """Seconds of what packs for it."""
    packed: int
    """Last slot for what packs; it goes with the launch, if that is earlier."""
    grows: int
    """Bytes that live longer if it is launched earlier."""
    holds: int
    """Bytes that live until its wait."""
    is_gather: bool
    unpack: float = 0.0
    """Seconds of what moves what it brought, if that is to be done while compute waits for another."""
    needs: tuple[int, ...] = ()
    """Numbers of the flights that must be waited for before it."""


@dataclass(frozen=True, slots=True)
class Event:
    """A launch or a wait in a slot."""

    slot: int
    node: int
    is_due: bool = False
    """Whether it is a wait behind all in its slot that does not need it; else it stands where its slot begins."""


class Windows:
    """Slots of a graph, and its flights."""

    def __init__(self, known: Nodes, needs: StorageNeeds, *, sinks: bool = True, fills: bool = False) -> None:
        """``sinks``: whether light compute that reads what a wait brings may stand further behind, too; ``fills``: whether what
        packs for a launch may stand further behind with it, where compute waits for another."""
        self.order, self.machine, self.fills = known.order, known.machine, fills
        self.known, nodes = known, known.order.nodes
        movable = known.movable(sinks=sinks)
        self.anchors = [i for i, moved in enumerate(movable) if not moved and nodes[i].op not in ("placeholder", "get_attr")]
        """The nodes that slots stand before, in their order; the last is the graph's output."""
        slot_of = {node: slot for slot, node in enumerate(self.anchors)}
        low, high = self._bounds(slot_of)
        self.flights = self._flights(low, high, needs)
        number_of = {wait: one.number for one in self.flights for wait in one.waits}
        self._link(number_of, movable)
        self.seconds, self.host = self._by_slot(slot_of, high)
        self.loose = self._loose() if fills else []
        """If packs fill waits: whether each node may run early, while compute waits for another collective.

        These are waits, what moves data, and light compute that reads nothing that a gather brought.
        """

    def _bounds(self, slot_of: dict[int, int]) -> tuple[list[int], list[int]]:
        """Of each node the first slot that it may stand in, and the last."""
        # Forward for the first slot, backward for the last. An anchor ends its slot: what needs it stands in the next slot or
        # later, what it needs stands in its own slot or earlier. All others pass on the bounds of their neighbours.
        after = self.known.after
        count = len(after)
        low, high = [0] * count, [len(self.anchors) - 1] * count
        for index, before in enumerate(self.order.before):
            found = max((low[one] for one in before), default=0)
            low[index] = max(found, slot_of[index] + 1) if index in slot_of else found
        for index in range(count - 1, -1, -1):
            found = min((high[one] for one in after[index]), default=len(self.anchors) - 1)
            high[index] = slot_of.get(index, found)
        return low, high

    def _flights(self, low: Sequence[int], high: Sequence[int], needs: StorageNeeds) -> list[MovableCollective]:
        given = self.known.given
        packs: dict[int, float] = {}
        for index, owner in enumerate(self.known.only):
            if owner >= 0 and owner != index:
                packs[owner] = packs.get(owner, 0.0) + self.machine.seconds[index]
        nodes, found = self.order.nodes, list[MovableCollective]()
        for launch, own in self.known.waits.items():
            node = nodes[launch]
            sent = [one for one in tensors_sent(node) if one.op == "call_function"]
            held, made = sum(needs.bytes_made(one) for one in sent), needs.bytes_made(node)
            kind = launch_kind(node)
            assert kind is not None
            # What it sends can be packed at any time, and then lives from the launch on. What others send is there before.
            early = all(given[self.order.index[one]] for one in sent)
            gathers = ROWS[kind].brings == "all parts"
            found.append(
                MovableCollective(
                    number=len(found),
                    launch=launch,
                    waits=own,
                    stream=self.machine.stream[launch],
                    seconds=self.machine.seconds[launch],
                    size=self.machine.bytes[launch],
                    low=low[launch],
                    last=high[launch],
                    high=min(high[wait] for wait in own),
                    pack=packs.get(launch, 0.0),
                    # What packs computed data stays in the slot that the launch has in the graph, unless it may fill waits.
                    packed=high[launch] if early or self.fills else min(bisect_left(self.anchors, launch), high[launch]),
                    grows=made + (held if early else 0) if gathers else 0,
                    holds=0 if early else held,
                    is_gather=gathers,
                    unpack=self._unpacks(own) if gathers and self.fills else 0.0,
                )
            )
        return found

    def _loose(self) -> list[bool]:
        gathered = {wait for one in self.flights if one.is_gather for wait in one.waits}
        moves, light = self.known.movable(sinks=False), self.known.movable(sinks=True)
        reads, found = list[bool](), list[bool]()
        for node, before in enumerate(self.order.before):
            read = any(reads[one] for one in before)
            reads.append(light[node] and (read or node in gathered))
            found.append(self.machine.stream[node] < 0 and (moves[node] or (light[node] and not read)))
        return found

    def _unpacks(self, waits: Sequence[int]) -> float:
        """Seconds of what moves what ``waits`` bring."""
        behind = reached(waits, lambda one: (reader for reader in self.known.after[one] if self.known.moves[reader]))
        return sum(self.machine.seconds[one] for one in behind)

    def _link(self, number_of: dict[int, int], movable: Sequence[bool]) -> None:
        """Say of each flight which others must be waited for before it."""
        # Every node passes the flights that it stands behind on to its readers, up to the next launch. Compute that keeps its
        # place passes on none: what reads it has a later slot than the waits before it anyway.
        launches = {one.launch: one for one in self.flights}
        leads = self._leading(launches.keys(), movable)
        nothing: frozenset[int] = frozenset()
        known: list[frozenset[int]] = []
        for index, before in enumerate(self.order.before):
            found = nothing
            if index in number_of:
                found = frozenset((number_of[index],))
            elif leads[index]:
                for one in before:
                    found = found | known[one] if known[one] else found
            if index in launches:
                launches[index].needs = tuple(sorted(found))
                found = nothing
            known.append(found)

    def _leading(self, launches: Collection[int], movable: Sequence[bool]) -> list[bool]:
        """Whether each node is one of ``launches``, or leads to one through nodes that move; no others need be looked at."""
        found = [False] * len(movable)
        for index in range(len(movable) - 1, -1, -1):
            found[index] = index in launches or (movable[index] and any(found[one] for one in self.known.after[index]))
        return found

    def _by_slot(self, slot_of: dict[int, int], high: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of compute and of the host in each slot, without launches, waits and what packs for launches.

        What unpacks the result of a wait counts in the slot of its first reader.
        """
        seconds, host = [0.0] * len(self.anchors), [0.0] * len(self.anchors)
        for index, node in enumerate(self.order.nodes):
            if not communicates(node) and self.known.only[index] < 0:
                at = slot_of.get(index, high[index])
                seconds[at] += self.machine.seconds[index]
                host[at] += self.machine.host[index]
        return seconds, host

    def arranged(self, events: Sequence[Event]) -> list[int]:
        """The nodes in an order that has ``events`` in theirs, each in its slot."""
        # Events of a slot get wishes between two whole numbers, in even steps: right behind the anchor before the slot, or for
        # a wait that is due right before the slot's own anchor. Then, backwards, what packs goes to its launch, and what may
        # fill waits to its first reader.
        # Inputs wish for -1, since the events of the first slot begin right behind that.
        wishes = [-1.0 if node.op == "placeholder" else float(index) for index, node in enumerate(self.order.nodes)]
        in_slot: dict[int, list[Event]] = {}
        for event in events:
            in_slot.setdefault(event.slot, []).append(event)
        for slot, here in in_slot.items():
            begin = self.anchors[slot - 1] if slot else -1
            for number, event in enumerate(here, 1):
                base = self.anchors[slot] - 1 if event.is_due else begin
                wishes[event.node] = base + number / (len(here) + 1)
        for index in range(len(wishes) - 1, -1, -1):
            owner = self.known.only[index]
            if owner >= 0 and owner != index:
                own = [] if self.fills or self.known.given[index] else [wishes[index]]
                wishes[index] = min([wishes[owner], *own, *(wishes[reader] for reader in self.known.after[index])])
            elif self.fills and owner < 0 and self.loose[index] and self.machine.stream[index] == COMPUTE:
                wishes[index] = min((wishes[reader] for reader in self.known.after[index]), default=wishes[index])
        return arranged(dict(enumerate(self.order.before)), wishes)

    def by_slot(self, order: Sequence[int], at: Sequence[int]) -> list[int]:
        """For each slot the largest number of its nodes in ``at``, which has one for each place of ``order``."""
        found, slot, most = [0] * len(self.anchors), 0, 0
        for node, live in zip(order, at, strict=True):
            most = max(most, live)
            if slot < len(self.anchors) and node == self.anchors[slot]:
                found[slot] = most
                slot, most = slot + 1, 0
        return found
