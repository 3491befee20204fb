"""A way to break a graph: what it looks at, where it can do so, and the graph that it changes.

An operator is asked once for the places of a graph, and then changes copies of it, one place at a time, on every rank that has
that graph: so a place is named by nodes, which have the same names in all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.passes.new_nodes import NodeMaker

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Phase, Value


Form = Literal["passed", "final"]
"""Which graphs are broken: those that the pass gives, or those that transformations behind it have made of them."""


@dataclass(frozen=True)
class SeenGraph:
    """One graph behind the pass, or behind all transformations, in which an operator looks for places; not to be changed."""

    phase: Phase
    passed: Passed
    rank: int
    """Whose graph it is."""
    mesh: Mesh
    entry_of: Mapping[str, str]
    """FQN of each planned parameter to its entry."""

    @property
    def graph(self) -> fx.Graph:
        """The graph, with the ``after`` nodes that keep its order, if there are any."""
        return self.passed.bucketed.graph

    @property
    def reading(self) -> GraphAnalysis:
        """What is read off the graph: launches with their members. Positions count nodes without those that keep order."""
        return self.passed.reading

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Position of each node in the graph."""
        return {node: place for place, node in enumerate(self.graph.nodes)}

    @property
    def inputs(self) -> tuple[Value, ...]:
        """What each placeholder is, in their order."""
        return self.passed.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What each returned value is, in order."""
        return self.passed.outputs


@dataclass
class BrokenGraph:
    """A copy of a graph, to be changed in place; ranks that share the graph share the copy, so it says no rank."""

    graph: fx.Graph
    root: torch.nn.Module
    """Holds the constants that the graph names."""
    nodes: dict[str, fx.Node] = field(init=False)
    """By name."""

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.graph.nodes}

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def before(self, place: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node right before ``place`` that calls ``target``; arguments may be nodes.

        Raises PassError if ``target`` cannot be called on what these hold.
        """
        # Module and direction are those of the place; the fake value is the node's own.
        with self.graph.inserting_before(place):
            return NodeMaker(self.graph, self._mode, {key: value for key, value in place.meta.items() if key != "val"})(
                target, *args, **kwargs
            )

    def behind(self, place: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """As :meth:`before`, right behind ``place``."""
        return self.before(place.next, target, *args, **kwargs)

    def again(self, place: fx.Node, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        """As :meth:`behind`, of a call of what ``node`` calls; with its own arguments if none are given."""
        assert callable(node.target)
        given = (args, kwargs) if args or kwargs else (node.args, node.kwargs)
        return self.behind(place, node.target, *given[0], **given[1])

    def bypass(self, node: fx.Node, by: fx.Node) -> None:
        """Let all that read ``node`` read ``by`` instead, and take ``node`` out."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    @property
    def _mode(self) -> FakeTensorMode:
        # Fake tensors of two modes cannot be mixed in one call, so new nodes get values in the mode of the others.
        values = (node.meta.get("val") for node in self.graph.nodes)
        return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


@dataclass(frozen=True, slots=True)
class Site:
    """One place, and what is done there."""

    node: str
    """Name of the node that is broken."""
    how: str
    """What is done, as a clause: ``it is not waited for``."""
    change: Callable[[BrokenGraph], None]
    on_last_rank: bool = False
    """Whether the last rank alone is broken, of the pipeline stage that has the graph."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A way to break a graph."""

    name: str
    says: str
    """What it does to a graph, one line."""
    sites: Callable[[SeenGraph], Iterator[Site]]
    """All places of a graph, in its order."""
    form: Form = "passed"
