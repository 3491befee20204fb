"""What the nodes of a longer trace are called, found from two short ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.capture.repeat.numbers import Name, Numbers
from pytest_fxbucket.capture.repeat.sweeps import MIDDLE

if TYPE_CHECKING:
    from pytest_fxbucket.capture.repeat.stamp import NameOf
    from pytest_fxbucket.capture.repeat.template import Copy, Template


class Names:
    """Numbers grow with the units that are traced before a node, dead nodes that the tracer took out again among them.

    So they grow by the same from unit to unit of one trace, and for one node from a trace to the next longer one.
    """

    def __init__(self, small: Template, large: Template) -> None:
        """``large`` has one unit more. Raises :class:`NotAlike` if it is not ``small`` with one unit more."""
        self._small = small
        order = small.order(large.run.units)
        if len(order) != len(large.nodes):
            raise NotAlike(f"one more layer gives {len(large.nodes)} nodes instead of {len(order)}")
        self._names = [Name.of(node.name) for node in small.nodes]
        self._growth: dict[int, Numbers] = {}
        self._step: dict[int, Numbers] = {}
        at = {small.places[i]: i for i in small.places}
        for (position, unit), node in zip(order, large.nodes, strict=True):
            place = small.places.get(position)
            if place is None or unit is None or place.unit != MIDDLE or unit == MIDDLE:
                self._growth[position] = self._names[position].growth(Name.of(node.name))
            else:
                before = at[type(place)(place.sweep, MIDDLE - 1, place.offset)]
                self._step[position] = self._names[before].growth(self._names[position])

    def for_units(self, units: int) -> NameOf:
        """Names in the trace of ``units`` units."""
        longer = units - self._small.run.units

        def name_of(copy: Copy) -> str:
            position, unit = copy
            name = self._names[position].grown(self._growth[position], longer)
            if unit is not None and position in self._step:
                name = name.grown(self._step[position], unit - MIDDLE)
            return str(name)

        return name_of
