"""One graph of a step whose work crosses iterations, as checks look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.gradients import returned

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value
    from pytest_fxbucket.graph.buckets import Bucket, Reading


@dataclass(frozen=True)
class Phased:
    """One graph of a step, read, with its inputs and outputs."""

    reading: Reading
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """All nodes, in order."""
        assert self.reading.order is not None
        return self.reading.order.nodes

    @cached_property
    def given(self) -> dict[fx.Node, Value]:
        """Input nodes with what they are."""
        return dict(zip((node for node in self.nodes if node.op == "placeholder"), self.inputs, strict=True))

    def role(self, node: fx.Node) -> str:
        """Role of an input; empty for other nodes."""
        return self.given[node].role if node in self.given else ""

    @cached_property
    def results(self) -> dict[tuple[str, str], Any]:
        """By role and name what is returned."""
        return {(v.role, v.fqn): node for node, v in zip(returned(self.nodes[-1]), self.outputs, strict=True)}


def is_moved(entry_of: Mapping[str, str], bucket: Bucket) -> bool:
    """Whether ``bucket`` reduces a gradient of what moves; ``entry_of`` has its parameters."""
    return bucket.kind in REDUCTIONS and not entry_of.keys().isdisjoint(bucket.fqns)
