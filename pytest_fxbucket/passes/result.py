"""A graph as it came out of a pass, and what is read off it: plain reading, which believes no report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import FakeTensor
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.calls import Call, calls_of
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.new_nodes import value_of
from pytest_fxbucket.passes.registry import Bucketed

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.step.portable import PortableGraph
    from pytest_fxbucket.step.roles import Value


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
    """What it was made of, read."""

    @cached_property
    def graph(self) -> fx.Graph:
        """Without the nodes that only keep its order."""
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


# What nodes say of the tensors that they give, ``meta["val"]``, beside what their operators give.


def wrong_values(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """Of each of ``nodes`` whose value is not what its operator gives for those of its inputs, what it says and what that is.

    ``nodes`` are in the order of their graph. Of one that says nothing its operator's value counts for those that read it.
    """
    unsaid: dict[fx.Node, Any] = {}
    for node in nodes:
        given = _given(node, unsaid)
        if "val" not in node.meta:
            unsaid[node] = given
        elif (said := value_text(node.meta["val"])) and (now := value_text(given)) and said != now:
            yield f"{node.name} says {said}, and {node.target} gives {now}"


def value_text(value: Any) -> str:
    """Dtype and shape; empty if it is no tensor."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _given(node: fx.Node, unsaid: Mapping[fx.Node, Any]) -> Any:
    """What the operator gives for what its inputs say; None if it cannot be called on that."""
    inputs = {one: one.meta.get("val", unsaid.get(one)) for one in node.all_input_nodes}
    mode = next((value.fake_mode for value in inputs.values() if isinstance(value, FakeTensor)), None)
    if mode is None or any(value is None for value in inputs.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda one: inputs[one])
    try:
        return value_of(mode, node.target, args, kwargs)
    except PassError:
        return None
