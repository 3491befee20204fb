"""Makes new nodes with their metadata and fake values, and arithmetic on sizes that may be symbolic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.passes.fake import fake_value
from pytest_fxbucket.passes.values import value_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode


class Maker:
    """Makes nodes at the graph's insertion point, one behind the other.

    ``make(target, *args, **kwargs)`` gives the node that calls ``target``; arguments may be nodes, and lists of nodes.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, meta: dict[str, Any]) -> None:
        self._graph, self._mode, self._meta = graph, mode, meta
        self._made: list[fx.Node] = []
        self._sizes: dict[tuple[object, ...], fx.Node] = {}

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """The node that calls ``target``; raises :class:`PassError` if it cannot be called on such values."""
        values = [_value(arg) for arg in args]
        keywords = {name: _value(arg) for name, arg in kwargs.items()}
        return self.holding(value_of(self._mode, target, values, keywords), target, *args, **kwargs)

    def holding(self, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """The node that calls ``target``, whose fake value is known to be ``value``."""
        # named as tracers name what they trace; given with it, arguments are walked in Python, which takes as long again
        node = self._graph.create_node("call_function", target, name=_name_of(target))
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        node.meta.update(self._meta, val=value)  # setting meta itself takes the node out of the graph's table and back
        self._made.append(node)
        return node

    def size(self, tensor: fx.Node, dim: int) -> int | fx.Node:
        """Size of ``tensor`` along ``dim``."""
        value = fake_value(tensor).shape[dim]
        return value if isinstance(value, int) else self._size(value, torch.ops.aten.sym_size.int, tensor, dim)

    def numel(self, tensor: fx.Node) -> int | fx.Node:
        """Elements of ``tensor``."""
        value = fake_value(tensor).numel()
        return value if isinstance(value, int) else self._size(value, torch.ops.aten.sym_numel.default, tensor)

    def times(self, size: int | fx.Node, factor: int) -> int | fx.Node:
        """``size * factor``."""
        return self._computed(operator.mul, size, factor)

    def over(self, size: int | fx.Node, divisor: int) -> int | fx.Node:
        """``size // divisor``."""
        return self._computed(operator.floordiv, size, divisor)

    def missing(self, size: int | fx.Node, unit: int) -> int | fx.Node:
        """What ``size`` lacks to the next multiple of ``unit``."""
        return self._computed(operator.mod, self._computed(operator.mul, size, -1), unit)

    def taken(self) -> tuple[fx.Node, ...]:
        """Nodes made since this was asked last, in order."""
        made, self._made = tuple(self._made), []
        return made

    def _computed(self, function: Callable[[Any, Any], Any], size: int | fx.Node, number: int) -> int | fx.Node:
        if isinstance(size, int):
            return int(function(size, number))
        return self._size(function(size.meta["val"], number), function, size, number)

    def _size(self, value: object, target: Callable[..., Any], *args: Any) -> fx.Node:
        """One node for one size, however often it is asked for."""
        key = (target, *args)
        if key not in self._sizes:
            self._sizes[key] = self.holding(value, target, *args)
        return self._sizes[key]


def _name_of(target: Callable[..., Any]) -> str:
    """``all_gather_into_tensor`` of any overload of it."""
    packet = getattr(target, "overloadpacket", target)
    return str(packet.__name__)


def _value(argument: Any) -> Any:
    if isinstance(argument, torch.fx.Node):
        return argument.meta["val"]
    return [_value(item) for item in argument] if isinstance(argument, (list, tuple)) else argument
