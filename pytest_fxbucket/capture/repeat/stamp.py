"""Writes the graph of many layers from the template of a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.capture.repeat.errors import NotAlike
from pytest_fxbucket.capture.repeat.sweeps import places_of, repeated, sweeps_of
from pytest_fxbucket.capture.repeat.template import Copy, Template, Traced
from pytest_fxbucket.capture.repeat.values import Values
from pytest_fxbucket.collector import paused
from pytest_fxbucket.compat.dispatch import unseen

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Value

NameOf = Callable[[Copy], str]
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_VALUES = ("val", "eager_input_vals")


class Stamp:
    """One longer graph in the making."""

    def __init__(self, template: Template, units: int, name_of: NameOf) -> None:
        self.template, self.units, self.name_of = template, units, name_of
        self.behind = units - template.run.units
        self.graph = fx.Graph()
        self.copies: dict[Copy, fx.Node] = {}
        self._values = Values(template, units)
        self._stacks: dict[tuple[int, int], dict[str, Any]] = {}
        self._by_path: dict[str, dict[str, Any]] = {}

    def traced(self) -> Traced:
        """The longer graph, with all that is known of its inputs and outputs."""
        with paused():
            with unseen():
                for copy in self.template.order(self.units):
                    self._add(copy)
            outputs = self._output()
            graph_module = fx.GraphModule(self.template.traced.graph_module, self.graph)
        inputs = self._inputs()
        return Traced(graph_module, inputs, outputs)

    def _add(self, copy: Copy) -> None:
        node = self.template.nodes[copy[0]]
        name = self.name_of(copy)
        args, kwargs = self._arguments(node, copy)
        target = name if node.op == "placeholder" else node.target
        new = self.graph.create_node(node.op, target, args, kwargs, name)
        if new.name != name:
            raise NotAlike(f"two nodes would be called {name}")
        new.meta = self._meta(node.meta, copy)
        self.copies[copy] = new

    def _arguments(self, node: fx.Node, reader: Copy | None) -> tuple[Any, Any]:
        def source(argument: fx.Node) -> fx.Node:
            found = self.template.source(self.template.positions[argument], reader, self.units)
            if found not in self.copies:
                raise NotAlike(f"{node.name} reads {argument.name}, which would come only after it")
            return self.copies[found]

        return fx.map_arg(node.args, source), fx.map_arg(node.kwargs, source)

    def _meta(self, meta: Mapping[str, Any], copy: Copy) -> dict[str, Any]:
        shift = self.template.shift(copy, self.units)
        found = dict(meta)
        for key in _STACKS:
            if key in meta:
                found[key] = self._stack(meta[key], shift)
        for key in _VALUES:
            if key in meta:
                found[key] = self._values.of(copy, meta[key])
        return found

    def _stack(self, stack: dict[str, Any], shift: int) -> dict[str, Any]:
        """One for all nodes of a module, as in a trace."""
        key = (id(stack), shift)
        if key not in self._stacks:
            renamed = {self._renamed(path, shift): (self._renamed(fqn, shift), cls) for path, (fqn, cls) in stack.items()}
            self._stacks[key] = self._by_path.setdefault(next(reversed(renamed), ""), renamed)
        return self._stacks[key]

    def _renamed(self, fqn: str, shift: int) -> str:
        return self.template.run.renamed(fqn, shift, self.behind)

    def _inputs(self) -> tuple[Value, ...]:
        values = self.template.traced.inputs
        placeholders = [copy for copy in self.copies if self.template.nodes[copy[0]].op == "placeholder"]
        number = {node: i for i, node in enumerate(n for n in self.template.nodes if n.op == "placeholder")}
        return tuple(
            self._value(values[number[self.template.nodes[c[0]]]], self.template.shift(c, self.units)) for c in placeholders
        )

    def _value(self, value: Value, shift: int) -> Value:
        return replace(value, fqn=self._renamed(value.fqn, shift))

    def _output(self) -> tuple[Value, ...]:
        """Outputs follow each other by the names of what they are: each layer's gradients, from layer to layer."""
        run, values = self.template.run, self.template.traced.outputs
        node = self.template.traced.graph_module.graph.output_node()
        units = [run.unit_of(value.fqn) for value in values]
        items = sweeps_of(units, run.units)
        places = places_of(items)
        returned: list[Any] = []
        found: list[Value] = []
        for position, unit in repeated(items, run.units, self.units):
            last = units[position] == run.units - 1
            shift = unit - places[position].unit if unit is not None else self.behind if last else 0
            returned.append(self._returned(node.args[0][position], places.get(position), shift))  # type: ignore[index]
            found.append(self._value(values[position], shift))
        new = self.graph.output(returned)
        new.meta = dict(node.meta)
        return tuple(found)

    def _returned(self, node: Any, place: Any, shift: int) -> Any:
        if not isinstance(node, fx.Node):
            return node
        position = self.template.positions[node]
        there = self.template.places.get(position)
        if place is None or there is None:
            return self.copies[self.template.source(position, None, self.units)]
        return self.copies[self.template.at(there, there.unit + shift, self.units)]
