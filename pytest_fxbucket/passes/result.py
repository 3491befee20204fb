"""A graph as it came out of a pass, and what is read off it: plain reading, which believes no report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.calls import Call, calls_of
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.fake_values import value_text, wrong_values
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.registry import Bucketed

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.step.portable import PortableGraph
    from pytest_fxbucket.step.roles import Value


def said_by(graph: fx.Graph) -> str:
    """What :attr:`Passed.said` is of ``graph``: the same in every process."""
    import hashlib

    told = hashlib.sha256()
    for node in graph.nodes:
        told.update(f"{value_text(node.meta.get('val'))} {module_of(node)} {direction_of(node)}\n".encode())
    return told.hexdigest()


@dataclass(frozen=True)
class Passed:
    """One graph; what it holds is read when first asked for. Ranks with equal graphs share one."""

    bucketed: Bucketed
    portable: PortableGraph
    digest: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each process group."""
    before: GraphAnalysis | None
    """Reading of the graph that the pass was given."""
    said: str = ""
    """Digest of what nodes say of their values, modules and directions, which the graph's own digest leaves out."""

    @cached_property
    def graph(self) -> fx.Graph:
        """The graph without the nodes that only keep its order."""
        return without_kept_order(self.bucketed.graph)

    @cached_property
    def reading(self) -> GraphAnalysis:
        """Every launch with its members in byte order, and who reads them. Raises PassError for a graph that cannot be read."""
        try:
            return read_graph(self.graph, self.inputs, self.outputs, self.before)
        except PassError as error:
            wrong = next(wrong_values(node for node in self.graph.nodes if node.op == "call_function"), "")
            raise PassError(f'{error}; meta["val"] is wrong: {wrong}' if wrong else str(error)) from error

    def refuse_unreadable(self) -> None:
        """Raise for a graph that cannot be read, as every check does, whatever it asks."""
        _ = self.reading

    @property
    def calls(self) -> list[Call]:
        """Launches and waits in order."""
        return self._called[0]

    @property
    def problems(self) -> list[str]:
        """What is wrong with launches and waits inside the graph."""
        return self._called[1]

    @cached_property
    def _called(self) -> tuple[list[Call], list[str]]:
        return calls_of(self.graph, self.reading, self.members)
