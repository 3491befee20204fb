"""What people call a launch: its kind, the parameters that it carries, its direction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import Bucket
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.reading import read_graph

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value


class Labels:
    """Names of the launches of a graph, which is read when the first is asked for: before it changes."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def of(self, launch: fx.Node) -> str:
        """``all_gather of layers.0.wq.weight (forward)``; what carries no parameter is called by what it sends."""
        return labelled(str(collectives.launch_kind(launch)), [self.carried(launch)], self.direction(launch))

    def carried(self, launch: fx.Node) -> str:
        """FQNs of the parameters that ``launch`` carries, else the names of the nodes that it sends."""
        bucket = self._buckets.get(launch.name)
        fqns = [fqn for fqn in bucket.fqns if fqn] if bucket is not None else []
        sent = collectives.sent_by(launch)
        nodes = sent if isinstance(sent, (list, tuple)) else [sent]
        return ", ".join(fqns or [getattr(node, "name", str(node)) for node in nodes])

    def direction(self, launch: fx.Node) -> str:
        """forward, backward or optimizer."""
        bucket = self._buckets.get(launch.name)
        return bucket.direction if bucket is not None else direction_of(launch)

    @cached_property
    def _buckets(self) -> dict[str, Bucket]:
        # what cannot be followed has launches all the same, and names of nodes do
        with suppress(PassError):
            return {bucket.node: bucket for bucket in read_graph(self._graph, self._inputs, self._outputs).buckets}
        return {}


def labelled(kind: str, carried: Sequence[str], direction: str) -> str:
    """One label for launches of one kind and direction: the first three that they carry, and how many more."""
    names = ", ".join(carried[:3]) + (f" and {len(carried) - 3} more" if len(carried) > 3 else "")
    return f"{kind} of {names} ({direction})"
