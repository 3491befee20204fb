"""The three graphs, put together from copies of a joint graph's nodes; and the values that one call hands to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.passes.new_nodes import NodeMaker, fake_value
from pytest_fxbucket.step.roles import Value
from pytest_fxbucket.transforms.next_iteration.block import Block


@dataclass(frozen=True, slots=True)
class CarriedValues:
    """One value that a call hands to the next."""

    node: fx.Node
    """Of the joint graph."""
    value: Value
    copies: bool
    """Whether it lives in memory of an input or attribute, which may be written before the next call: it must be a copy."""


def carried_of(block: Block) -> list[CarriedValues]:
    """The values that the block must be handed, in order of their first readers.

    A gradient is named by the FQN of its parameter, a learning rate by its own name; other values are counted from 1.
    """
    gradients = {
        maker: fqn for one in block.reductions if one.level == 0 for fqn, maker in zip(one.fqns, one.makers, strict=True)
    }
    gradients |= {node: value.fqn for node, value in block.results if value.role == "grad" and node not in gradients}
    lasting = {
        storage
        for node in block.order.nodes
        if node.op in ("placeholder", "get_attr")
        for storage in block.order.storages(node)
    }
    found: list[CarriedValues] = []
    names: Counter[str] = Counter()
    for node in block.fed():
        given = block.given.get(node)
        if node.op == "get_attr" or (given is not None and block.is_own(given)):
            continue
        name = gradients.get(node, f"value {1 + sum(name.startswith('value ') for name in names)}")
        if given is not None:
            name = given.fqn if given.role == "hyper" else f"{given.role} {given.fqn}"
        names[name] += 1
        if names[name] > 1:
            name = f"{name} #{names[name]}"
        tensor: torch.Tensor = node.meta["val"]
        value = Value("carried", name, tuple(tensor.shape), tensor.dtype)
        found.append(CarriedValues(node, value, not lasting.isdisjoint(block.order.storages(node))))
    return found


Nodes = dict[fx.Node, fx.Node]
"""By a node of the joint graph its copy."""


class CutGraph:
    """A joint graph, cut where its block begins."""

    def __init__(self, block: Block) -> None:
        self.block, self.handed = block, carried_of(block)
        self.output = block.order.nodes[-1]

    @property
    def carried(self) -> tuple[Value, ...]:
        """What calls hand to each other."""
        return tuple(one.value for one in self.handed)

    @cached_property
    def own_inputs(self) -> tuple[Value, ...]:
        """Parameters and state that the block itself reads, in order of the joint graph's inputs."""
        return tuple(self.block.given[node] for node in self._own_placeholders)

    @cached_property
    def moved(self) -> list[tuple[fx.Node, Value]]:
        """Results of the block."""
        return [(node, value) for node, value in self.block.results if node in self.block.nodes]

    @cached_property
    def other_results(self) -> list[tuple[Any, Value]]:
        """All other results."""
        return [(item, value) for item, value in self.block.results if item not in self.block.nodes]

    def setup(self) -> fx.Graph:
        """The step without its block."""
        graph, copies = fx.Graph(), Nodes()
        _copy(graph, [*self.block.given, *self._rest], copies)
        graph.output([*(_of(copies, item) for item, _ in self.other_results), *self._handed_on(graph, copies)])
        return graph

    def cleanup(self) -> fx.Graph:
        """The block alone."""
        graph, copies = fx.Graph(), Nodes()
        _copy(graph, self._own_placeholders, copies)
        self._take(graph, copies)
        _copy(graph, [*self._attributes, *self.block.running], copies)
        graph.output([copies[node] for node, _ in self.moved])
        return graph

    def steady(self) -> tuple[fx.Graph, Nodes]:
        """The block of the call before, then the rest of this call; with the copies of the block's nodes and of all inputs."""
        # A joint node may have two copies, one in the block and one in the rest. Both parts take the same placeholders, but the
        # rest, copied last, finds new parameters and state in place of the placeholders that the block updates.
        graph, block, rest = fx.Graph(), Nodes(), Nodes()
        _copy(graph, self.block.given, rest)
        given = dict(rest)
        block.update(rest)
        self._take(graph, block)
        _copy(graph, [*self._attributes, *self.block.running], block)
        new = {value.key: block[node] for node, value in self.moved}
        rest.update({node: new.get(value.key, rest[node]) for node, value in self.block.given.items()})
        _copy(graph, self._rest, rest)
        returned = [_of(block if item in self.block.nodes else rest, item) for item, _ in self.block.results]
        graph.output([*returned, *self._handed_on(graph, rest)])
        return graph, given | {node: block[node] for node in self.block.running}

    @cached_property
    def _rest(self) -> list[fx.Node]:
        """Nodes that stay, inputs aside: all but the block's, and of the copied ones those that something else needs."""
        # From the last node to the first, so that whether a copied node's readers stay is known when it is met.
        wanted = {node for node, _ in self.other_results} | {one.node for one in self.handed}
        gone: set[fx.Node] = set()
        for node in reversed(self.block.order.nodes):
            idle = all(user in self.block.nodes or user in gone or user is self.output for user in node.users)
            if node in self.block.nodes or (node in self.block.copied and idle and node not in wanted):
                gone.add(node)
        return [n for n in self.block.order.nodes if n not in gone and n.op not in ("placeholder", "output")]

    @cached_property
    def _own_placeholders(self) -> list[fx.Node]:
        fed = self.block.fed()
        return [node for node, value in self.block.given.items() if node in fed and self.block.is_own(value)]

    @cached_property
    def _attributes(self) -> list[fx.Node]:
        return [node for node in self.block.fed() if node.op == "get_attr"]

    def _take(self, graph: fx.Graph, copies: Nodes) -> None:
        """Add a placeholder for each value that the call before handed on."""
        for number, one in enumerate(self.handed, 1):
            copies[one.node] = graph.placeholder(f"carried_{number}")
            copies[one.node].meta = {"val": one.node.meta["val"]}

    def _handed_on(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
        clone = torch.ops.aten.clone.default
        handed = [(copies[one.node], one.copies) for one in self.handed]
        return [NodeMaker(graph, fake_value(node).fake_mode, {})(clone, node) if copied else node for node, copied in handed]


def _of(copies: Mapping[fx.Node, fx.Node], item: Any) -> Any:
    """The copy of what a graph returns: a node, or a constant, which is its own."""
    return copies[item] if isinstance(item, fx.Node) else item


def _copy(graph: fx.Graph, nodes: Iterable[fx.Node], copies: Nodes) -> None:
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
