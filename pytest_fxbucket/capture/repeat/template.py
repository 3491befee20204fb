"""A short trace, read: which node belongs to which unit of the layers, and what a node refers to, seen from its unit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.capture.repeat.sweeps import Items, Place, places_of, repeated, source_of, sweeps_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.repeat.layers import Run
    from pytest_fxbucket.capture.roles import Value


@dataclass(frozen=True)
class Traced:
    """A joint graph, and a role and a name for each of its inputs and outputs."""

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


Copy = tuple[int, int | None]
"""A node of the longer graph: position in the template, and unit of the longer run; None outside all sweeps."""


class Template:
    """A trace of a model with ``run.units`` units. Raises :class:`NotAlike` if its nodes do not repeat from unit to unit."""

    def __init__(self, traced: Traced, run: Run) -> None:
        self.traced, self.run = traced, run
        self.nodes = [node for node in traced.graph_module.graph.nodes if node.op != "output"]
        self.units = [*self._units_of_nodes()]
        self.items: Items = sweeps_of(self.units, run.units)
        self.places = places_of(self.items)
        self.positions = {node: i for i, node in enumerate(self.nodes)}
        self._chunks = [item.chunks for item in self.items if not isinstance(item, int)]
        self._refuse_other_operators()

    def _units_of_nodes(self) -> Iterable[int | None]:
        inputs = iter(self.traced.inputs)
        known: dict[str, int | None] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                yield self.run.unit_of(next(inputs).fqn)
                continue
            stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
            path = next(reversed(stack)) if stack else ""
            if path not in known:
                known[path] = self.run.unit_of(path)
            yield known[path]

    def _refuse_other_operators(self) -> None:
        for chunks in self._chunks:
            for positions in zip(*chunks, strict=True):
                nodes = [self.nodes[i] for i in positions]
                if any(node.op in ("get_attr", "call_module") for node in nodes):
                    raise NotAlike(f"a layer holds the constant {nodes[0].target}")
                calls = {str(node.target) if node.op == "call_function" else node.op for node in nodes}
                if len(calls) > 1:
                    raise NotAlike(f"layers call different operators in the same place: {' and '.join(sorted(calls))}")

    def order(self, units: int) -> list[Copy]:
        """The nodes of the graph with ``units`` units."""
        return repeated(self.items, self.run.units, units)

    def source(self, position: int, reader: Copy | None, units: int) -> Copy:
        """Which copy the copy ``reader`` means where the template's node refers to the node at ``position``.

        From unit to unit a distance stays; from and to what lies in no sweep it is the very same node, counted from the end
        for those behind the middle.
        """
        place = self.places.get(position)
        if place is None:
            return (position, None)
        return self.at(place, self._unit(place, reader, units), units)

    def at(self, place: Place, unit: int, units: int) -> Copy:
        """The copy in ``unit`` of what lies at ``place`` in another. Raises :class:`NotAlike` if there is none."""
        if not 1 <= unit <= units - 2:
            raise NotAlike("a layer reads from a layer further away than the next")
        return (self._chunks[place.sweep][source_of(unit, self.run.units, units) - 1][place.offset], unit)

    def _unit(self, place: Place, reader: Copy | None, units: int) -> int:
        own = self.places.get(reader[0]) if reader is not None else None
        if reader is None or own is None or reader[1] is None:
            return (
                place.unit
                if place.unit == source_of(place.unit, self.run.units, units)
                else place.unit + units - self.run.units
            )
        return reader[1] + place.unit - own.unit

    def shift(self, copy: Copy, units: int) -> int:
        """By how many units the modules that ``copy`` is named after move."""
        position, unit = copy
        if unit is not None:
            return unit - self.places[position].unit
        return units - self.run.units if self.units[position] == self.run.units - 1 else 0
