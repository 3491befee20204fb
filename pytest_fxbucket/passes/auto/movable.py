"""Which nodes may move with launches and waits; all others keep their order.

What only moves data goes with the launch that it packs for, or stays; so does what makes something of parameters alone, for
launches alone (a cast before a gather). Light compute that reads what a wait brings, such as the sum of two all-reduced
gradients, may be put off with the wait until something else needs it: products of matrices never are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.order import moves_freely
from pytest_fxbucket.passes.arrange import readers

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.auto.machine import Machine


class Nodes:
    """What is known of a graph's nodes, whatever its order."""

    def __init__(self, order: Order, machine: Machine) -> None:
        self.order = order
        self.after = readers(order)
        """Of each node those that must stay behind it."""
        self.waits = _waits(order, machine)
        """Of each launch that somebody waits for its waits."""
        calls = [node.op == "call_function" and moves_freely(node) for node in order.nodes]
        self.moves = [free and moves_data(node) for free, node in zip(calls, order.nodes, strict=True)]
        """Whether it only moves data, and may be moved."""
        self._light = [free and not multiplies(node) for free, node in zip(calls, order.nodes, strict=True)]
        self.given = self._of_inputs_alone()
        """Whether it makes something of parameters and other inputs alone, but for products."""
        self.only = self._for_launches()
        """Of what is read by launches alone, through what goes with them, the first such launch; else -1."""
        lands = {wait for waits in self.waits.values() for wait in waits}
        self._lands = [index in lands for index in range(len(order.nodes))]

    def movable(self, *, sinks: bool) -> list[bool]:
        """Whether each node may move; ``sinks``: light compute, too, behind the wait that it reads."""
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
        found = [-1] * len(self.after)
        nodes = self.order.nodes
        for index in range(len(nodes) - 1, -1, -1):
            if launch_kind(nodes[index]) is not None:
                found[index] = index
            elif self.after[index] and nodes[index].op != "placeholder" and (self.moves[index] or self.given[index]):
                owners = [found[reader] for reader in self.after[index]]
                found[index] = min(owners) if min(owners) >= 0 else -1
        return found


def _waits(order: Order, machine: Machine) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for index, node in enumerate(order.nodes):
        if is_wait(node) and machine.launch[index] >= 0:
            found.setdefault(machine.launch[index], []).append(index)
    return {launch: tuple(waits) for launch, waits in sorted(found.items())}
