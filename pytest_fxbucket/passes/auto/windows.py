"""Where each launch and wait may stand: compute keeps its order, and each stands in a slot, before one node of it.

What only moves data goes with the launch that it packs for, or stays; so does what makes something of parameters alone, for
launches alone (a cast before a gather). Light compute that reads what a wait brings, such as the sum of two all-reduced
gradients, may be put off with the wait until something else needs it: products of matrices never are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import ROWS, communicates, is_wait, launch_kind, tensors_sent
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.order import moves_freely
from pytest_fxbucket.passes.arrange import arranged, readers

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.needs import Needs
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.auto.machine import Machine


@dataclass(slots=True, eq=False)
class Flight:
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

    def __init__(self, order: Order, machine: Machine, needs: Needs, *, sinks: bool = True, fills: bool = False) -> None:
        """``sinks``: whether light compute that reads what a wait brings may stand further behind, too; ``fills``: whether what
        packs for a launch may stand further behind with it, where compute waits for another."""
        self.fills = fills
        self.order, self.machine = order, machine
        nodes = order.nodes
        self._after = after = readers(order)
        moves = [_stays_with_launches(node) for node in nodes]
        self._given = given = _of_inputs_alone(order)
        self._only = self._for_launches(after, moves, given)
        waits = _waits(order, machine)
        movable: list[bool] = []
        behind: list[bool] = []  # a wait, or what only moves what a wait gave
        for i, node in enumerate(nodes):
            lands = is_wait(node) and machine.launch[i] in waits
            follows = moves[i] or (sinks and _is_light(node))
            behind.append(lands or (follows and any(behind[one] for one in order.before[i])))
            packs = self._only[i] >= 0 and (moves[i] or given[i])
            movable.append(behind[i] or packs or i in waits)
        self.anchors = [i for i, moved in enumerate(movable) if not moved and nodes[i].op not in ("placeholder", "get_attr")]
        """The nodes that slots stand before, in their order; the last is the graph's output."""
        slot_of = {node: slot for slot, node in enumerate(self.anchors)}
        low, high = self._bounds(after, slot_of, movable)
        self.flights = self._flights(waits, low, high, given, needs)
        number_of = {wait: one.number for one in self.flights for wait in one.waits}
        self._link(number_of, movable)
        self.seconds, self.host = self._by_slot(slot_of, high)

    def _for_launches(self, after: Sequence[Sequence[int]], moves: Sequence[bool], given: Sequence[bool]) -> list[int]:
        """Of what is read by launches alone, through what goes with them, the first such launch; else -1."""
        found = [-1] * len(after)
        nodes = self.order.nodes
        for index in range(len(nodes) - 1, -1, -1):
            if launch_kind(nodes[index]) is not None:
                found[index] = index
            elif after[index] and nodes[index].op != "placeholder" and (moves[index] or given[index]):
                owners = [found[reader] for reader in after[index]]
                found[index] = min(owners) if min(owners) >= 0 else -1
        return found

    def _bounds(
        self, after: Sequence[Sequence[int]], slot_of: dict[int, int], movable: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """Of each node the first slot that it may stand in, and the last."""
        count = len(after)
        low, high = [0] * count, [len(self.anchors) - 1] * count
        for index, before in enumerate(self.order.before):
            found = max((low[one] for one in before), default=0)
            low[index] = max(found, slot_of[index] + 1) if index in slot_of else found
        for index in range(count - 1, -1, -1):
            found = min((high[one] for one in after[index]), default=len(self.anchors) - 1)
            high[index] = slot_of.get(index, found)
        return low, high

    def _flights(
        self, waits: dict[int, tuple[int, ...]], low: Sequence[int], high: Sequence[int], given: Sequence[bool], needs: Needs
    ) -> list[Flight]:
        packs: dict[int, float] = {}
        for index, owner in enumerate(self._only):
            if owner >= 0 and owner != index:
                packs[owner] = packs.get(owner, 0.0) + self.machine.seconds[index]
        nodes, found = self.order.nodes, list[Flight]()
        for launch, own in waits.items():
            node = nodes[launch]
            sent = [one for one in tensors_sent(node) if one.op == "call_function"]
            held, made = sum(needs.made(one) for one in sent), needs.made(node)
            kind = launch_kind(node)
            assert kind is not None
            early = all(given[self.order.index[one]] for one in sent)  # what it sends can be packed at any time
            gathers = ROWS[kind].brings == "all parts"
            found.append(
                Flight(
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
                    packed=high[launch] if early or self.fills else min(bisect_left(self.anchors, launch), high[launch]),
                    grows=made + (held if early else 0) if gathers else 0,
                    holds=0 if early else held,
                    is_gather=gathers,
                )
            )
        return found

    def _link(self, number_of: dict[int, int], movable: Sequence[bool]) -> None:
        """Say of each flight which others must be waited for before it."""
        known: list[frozenset[int]] = []
        nothing: frozenset[int] = frozenset()
        launches = {one.launch: one for one in self.flights}
        for index, before in enumerate(self.order.before):
            if index in number_of:
                known.append(frozenset((number_of[index],)))
                continue
            found = nothing
            if movable[index]:
                for one in before:
                    found = found | known[one] if known[one] else found
            if index in launches:
                launches[index].needs = tuple(sorted(found))
                found = nothing
            known.append(found)

    def _by_slot(self, slot_of: dict[int, int], high: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of compute and of the host in each slot, launches, waits and what packs for launches aside.

        What moves what a wait gave stands behind it, in the slot of the first that reads it.
        """
        seconds, host = [0.0] * len(self.anchors), [0.0] * len(self.anchors)
        for index, node in enumerate(self.order.nodes):
            if not communicates(node) and self._only[index] < 0:
                at = slot_of.get(index, high[index])
                seconds[at] += self.machine.seconds[index]
                host[at] += self.machine.host[index]
        return seconds, host

    def arranged(self, events: Sequence[Event]) -> list[int]:
        """The nodes in an order that has ``events`` in theirs, each in its slot."""
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
            owner = self._only[index]
            if owner >= 0 and owner != index:
                own = [] if self.fills or self._given[index] else [wishes[index]]
                wishes[index] = min([wishes[owner], *own, *(wishes[reader] for reader in self._after[index])])
        return arranged(dict(enumerate(self.order.before)), wishes)

    def by_slot(self, order: Sequence[int], at: Sequence[int]) -> list[int]:
        """The most of ``at``, which is by place in ``order``, that any node of each slot has."""
        found, slot, most = [0] * len(self.anchors), 0, 0
        for node, live in zip(order, at, strict=True):
            most = max(most, live)
            if slot < len(self.anchors) and node == self.anchors[slot]:
                found[slot] = most
                slot, most = slot + 1, 0
        return found


def _stays_with_launches(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node) and moves_freely(node)


def _is_light(node: fx.Node) -> bool:
    """Whether ``node`` computes little, and may stand behind a wait that is put off."""
    return node.op == "call_function" and moves_freely(node) and not multiplies(node)


def _of_inputs_alone(order: Order) -> list[bool]:
    """Of each node whether it makes something of parameters and other inputs alone, and may be moved."""
    found: list[bool] = []
    for node, before in zip(order.nodes, order.before, strict=True):
        found.append(moves_freely(node) and not multiplies(node) and all(found[one] for one in before))
    return found


def _waits(order: Order, machine: Machine) -> dict[int, tuple[int, ...]]:
    """Of each launch that somebody waits for its waits."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(order.nodes):
        if is_wait(node) and machine.launch[index] >= 0:
            found.setdefault(machine.launch[index], []).append(index)
    return {launch: tuple(waits) for launch, waits in sorted(found.items())}
