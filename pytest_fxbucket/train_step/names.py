"""Names the nodes of a whole step that a user's function runs: modules, backward, and what is done to a gradient by itself."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.compat import trace

if TYPE_CHECKING:
    from torch import fx, nn

_GRADIENT_OF = "fxbucket_gradient_of"


class StepNamer(NodeNamer):
    """Follows a function that calls the model and its backward, as often and in whatever order it likes.

    Asked after every node (:meth:`flush`). Backward is seen by the autograd node that is being run, so it does not matter who
    started it. ``owners``: by the identity of a parameter the FQN of its module.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, owners: Mapping[int, str]) -> None:
        super().__init__(model)
        self._graph, self._parameters = graph, owners

    @property
    def failed_module(self) -> str | None:
        """FQN of the module that the exception being handled was raised in; None if in none."""
        error, fqn = self._raised
        return fqn if error is not None and error is sys.exc_info()[1] else None

    def is_gradient(self, node: fx.Node, fqn: str) -> None:
        """``node`` is the gradient of a parameter of the module ``fqn``."""
        node.meta.setdefault(_GRADIENT_OF, fqn)

    def flush(self) -> None:
        """Name the nodes that were added since the last call."""
        running = trace.current_autograd_node()
        self._backward = None if running is None else self._owner(running)
        node = self._last.next if self._last is not None else next(iter(self._graph.nodes))
        while node.op != "root":
            self._name(node)
            self._last = node
            node = node.next

    def _owner(self, running: object) -> str:
        accumulated = self._parameters.get(id(getattr(running, "variable", None)))
        if accumulated is not None:
            return accumulated
        place = bisect_right(self._numbers, trace.autograd_number(running)) - 1
        return self._owners[place] if place >= 0 else ""

    def _name(self, node: fx.Node) -> None:
        before = self._backward
        if before is None and len(self._stack) == 1:
            self._backward = _gradient_owner(node)
        super()._name(node)
        self._backward = before


def _gradient_owner(node: fx.Node) -> str | None:
    """Of a collective on a gradient, and of what follows it: the module whose gradient it is."""
    seen: fx.Node | None = node
    while seen is not None and _GRADIENT_OF not in seen.meta:
        inputs = seen.all_input_nodes
        seen = inputs[0] if len(inputs) == 1 else None
    return None if seen is None else str(seen.meta[_GRADIENT_OF])
